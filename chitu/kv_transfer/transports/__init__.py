"""How bytes get into a peer's memory: one interface and its implementations."""
