"""OpenAI's Responses API. `dialect.py` says all of it."""
