"""Qwen3 (dense): RMS norms on the heads of q and k, before the rotation."""

from __future__ import annotations

from chitu.models.config import ModelSpec
from chitu.models.traits import Traits


def traits(spec: ModelSpec) -> Traits:
    return Traits(qkv_bias=spec.attention_bias, output_bias=spec.attention_bias, qk_norm=True)
