"""Embeddings, scores and rerankings: routes that return no text."""
