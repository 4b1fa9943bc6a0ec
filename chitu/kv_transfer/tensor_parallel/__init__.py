"""Which rank writes which heads where, and the followers' part in it."""
