"""Llama 2 and 3, and Mistral without a sliding window: no norms on heads, biases only if the config has them."""

from __future__ import annotations

from chitu.models.config import ModelSpec
from chitu.models.traits import Traits


def traits(spec: ModelSpec) -> Traits:
    """Return the traits: `attention_bias` puts a bias on all four projections."""
    return Traits(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias)
