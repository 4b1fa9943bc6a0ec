"""A gated RMS norm over groups that several ranks have parts of: Mamba-2 with fewer groups than ranks.

Owns the sum of squares that goes over the ranks. Every rank adds up the squares of its own part of its group, all ranks
sum up one number a row and group, and each scales its part. The library's norm knows no ranks, so its formula is
repeated here, and compared with it on random numbers before it takes its place. Called by the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from chitu.errors import UnsupportedModel
from chitu.models.generic.mixer_cuts import NormGroup

NUM_RANDOM = 5
"""Rows of random numbers."""
TOLERANCE = 1e-5
TOLERANCE_16_BITS = 2e-2


def split_norm(norm: Any, group: NormGroup, summed: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Let a norm of one group, of which it has this rank's part, scale by the squares of all ranks. `summed`: returns
    the sum over the ranks, or None while ranks compute alone; then the part is a group of its own. Raises
    UnsupportedModel if the norm computes something else."""
    library: Callable[..., torch.Tensor] = norm.forward
    width = norm.weight.shape[0]

    def scaled(hidden: torch.Tensor, gate: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        gated = hidden.float() * F.silu(gate.float())
        gated = gated * torch.rsqrt(mean(gated.pow(2).sum(-1, keepdim=True)) + norm.variance_epsilon)
        out: torch.Tensor = norm.weight * gated.to(hidden.dtype)
        return out.to(hidden.dtype)

    def of_group(squares: torch.Tensor) -> torch.Tensor:
        by_group = squares.new_zeros(*squares.shape[:-1], group.num_groups)
        by_group[..., group.own : group.own + 1] = squares
        total = summed(by_group)
        return squares / width if total is None else total[..., group.own : group.own + 1] / group.width

    def forward(hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return scaled(hidden_states, gate, of_group)

    _check(norm, library, lambda hidden, gate: scaled(hidden, gate, lambda squares: squares / width))
    norm.forward = forward


def _check(norm: Any, theirs: Callable[..., torch.Tensor], mine: Callable[..., torch.Tensor]) -> None:
    weight = norm.weight
    generator = torch.Generator().manual_seed(1)
    hidden, gate = (
        torch.randn(1, NUM_RANDOM, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
        for _ in range(2)
    )
    with torch.no_grad():
        found, right = mine(hidden, gate).float(), theirs(hidden, gate).float()
    apart = float((found - right).abs().max() / right.abs().max())
    if not apart <= (TOLERANCE if weight.dtype == torch.float32 else TOLERANCE_16_BITS):
        raise UnsupportedModel(
            f"{type(norm).__name__} is served on no more ranks than it has groups: it is no RMS norm of gated numbers, "
            f"from which it differs by {apart:.2g}"
        )
