"""P's side of a transfer."""
