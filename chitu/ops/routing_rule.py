"""How each row of a mixture gets its experts, and the gate of these: read by `models/config_parts.py`, applied by
`routing.py` and the operations. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class RoutingRule:
    top_k: int
    """Number of experts of each row."""
    num_groups: int = 1
    top_groups: int = 1
    """Number of best groups, of `num_groups` groups of consecutive experts, from which experts are chosen."""
    group_votes: int = 1
    """Number of best experts whose scores add up to their group's score."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the logits."""
    is_normalised: bool = True
    """Whether the weights of a row's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of all weights."""


class ClampedGate(NamedTuple):
    """Gate of experts that are not `silu(gate) up`, but `g sigmoid(alpha g) (u + 1)`: `g` is the gate, at most `limit`,
    and `u` the up, within the limit on both sides (gpt-oss)."""

    alpha: float
    limit: float
