"""How each row of a mixture gets its experts: read by `models/expert_spec.py`, applied by `routing.py`. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
