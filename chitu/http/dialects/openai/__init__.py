"""OpenAI's completions and chats, with the extensions of vLLM and SGLang, and the cold routes beside them.
`dialect.py` says all of it."""
