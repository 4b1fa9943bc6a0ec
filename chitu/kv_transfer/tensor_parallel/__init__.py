"""Which rank writes which heads to which rank, and the followers' part in it."""
