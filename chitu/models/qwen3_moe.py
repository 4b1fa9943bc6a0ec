"""Qwen3-MoE: attention as in Qwen3, a mixture of experts in place of the MLP (in some layers or all)."""

from __future__ import annotations

from chitu.models.config import ModelSpec
from chitu.models.qwen3 import traits as dense_traits
from chitu.models.traits import Traits


def traits(spec: ModelSpec) -> Traits:
    return dense_traits(spec)
