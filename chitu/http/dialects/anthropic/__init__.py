"""Anthropic's Messages API. `dialect.py` says all of it."""
