"""What becomes of a request on the router: attempts, retries, routing, and what was told to whom. No HTTP."""
