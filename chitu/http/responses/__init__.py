"""`/v1/responses`: turns its request into a chat request, and parts of a chat's message into its events. Pure."""
