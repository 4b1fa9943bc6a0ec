"""How bytes get into a peer's memory: one interface, and what implements it."""
