"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection, whatever is in the config."""

from __future__ import annotations

from chitu.models.config import ModelSpec
from chitu.models.traits import Traits


def traits(spec: ModelSpec) -> Traits:
    return Traits(qkv_bias=True)
