"""Embeddings, scores and rerankings: routes that return no text. `dialect.py` says all of it."""
