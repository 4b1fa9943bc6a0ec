"""Points in which the families of `models/` differ beyond their configs. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traits:
    """Points in which the families differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
