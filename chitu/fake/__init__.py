"""Fake P, D and unified instances (`chitu serve --fake`): real but for the engine, which computes no model."""
