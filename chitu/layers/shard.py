"""The calls with which layers reach the other tensor-parallel ranks of their instance (`engine/parallel.py`).

They are collective: every rank runs the same layers on its part of the weights, with the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Shard(Protocol):
    """This rank among `size`. Called only by the step thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' `x` in place. Every rank gets the same bits. Returns when all ranks have contributed."""
        ...

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Return the ranks' columns side by side, `[R, sum(widths)]`, rank i having `widths[i]`; None off rank 0."""
        ...
