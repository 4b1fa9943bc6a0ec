"""What config.json says about multi-head latent attention (DeepSeek-V2 and -V3), and about yarn. No torch.

Called by `models/config.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of latent attention. The cache holds `kv_rank + rope_dim` numbers a token, whatever the number of heads."""

    q_rank: int | None
    """None: q is projected in one."""
    kv_rank: int
    rope_dim: int
    """The part of a head that is rotated; all heads share that of the key."""
    nope_dim: int
    """The part of a head that is not."""
    value_dim: int
    is_interleaved: bool
    """The checkpoint has the two coordinates of a rotation side by side, not half a head apart."""
    softmax_scale: float


def read_latent_spec(config: dict[str, Any], rope: dict[str, Any], is_v3: bool) -> LatentSpec:
    """`rope`: its parameters, whichever way they are spelt. KeyError where a field is missing."""
    nope_dim, rope_dim = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    scale = float((nope_dim + rope_dim) ** -0.5)
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2
    q_rank = config.get("q_lora_rank")
    return LatentSpec(
        q_rank=None if q_rank is None else int(q_rank),
        kv_rank=int(config["kv_lora_rank"]),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=int(config["v_head_dim"]),
        is_interleaved=bool(config.get("rope_interleave", True)) if is_v3 else True,
        softmax_scale=scale,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(rope: dict[str, Any]) -> float:
    """What cos and sin are multiplied by."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, mscale, all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(all_dim))
    return yarn_mscale(factor)
