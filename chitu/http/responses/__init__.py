"""`/v1/responses`: its request becomes that of a chat, the parts of a chat's message become its events. Pure."""
