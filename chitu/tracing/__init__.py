"""Trace records: how an instance sends them, how the router keeps and finds them."""
