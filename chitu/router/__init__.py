"""Requests on the router: attempts, retries, routing, and the messages to instances. No HTTP."""
