"""D's side of a transfer."""
