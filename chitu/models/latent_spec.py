"""Reads multi-head latent attention from config.json (DeepSeek-V2 and -V3). No torch.

Called by `models/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chitu.errors import ConfigError
from chitu.models.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of latent attention. The cache holds `kv_rank + rope_dim` numbers a token, for any number of heads."""

    q_rank: int | None
    """Rank of the projection of q; None if one matrix projects q."""
    kv_rank: int
    rope_dim: int
    """Size of the rotated part of a head; all heads share that of the key."""
    nope_dim: int
    """Size of the part of a head that is not rotated."""
    value_dim: int
    is_interleaved: bool
    """Whether the checkpoint stores the two coordinates of a rotation side by side, not half a head apart."""
    softmax_scale: float


def read_latent_spec(values: Mapping[str, Any], rope: RopeSpec, where: str) -> LatentSpec:
    """Return the spec. `values`: those of the whole config. Raises ConfigError if a key contradicts the other keys."""
    nope_dim, rope_dim = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    for key, wanted, by in (
        ("head_dim", rope_dim, "qk_rope_head_dim"),
        ("qk_head_dim", nope_dim + rope_dim, "qk_nope_head_dim and qk_rope_head_dim"),
        ("num_key_value_heads", values["num_attention_heads"], "num_attention_heads"),
    ):
        if values[key] not in (None, wanted):
            raise ConfigError(f"{where}: {key} is {values[key]}, by {by} it is {wanted}")
    return LatentSpec(
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=values["v_head_dim"],
        is_interleaved=bool(values.get("rope_interleave", True)),
        softmax_scale=float((nope_dim + rope_dim) ** -0.5) * rope.score_factor,
    )
