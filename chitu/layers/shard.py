"""What the layers ask of the other tensor-parallel ranks of their instance. `engine/parallel.py` implements it.

Every rank runs the same layers on its part of the weights and meets the others at these calls, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Shard(Protocol):
    """This rank among `size`. Called by the step thread alone."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in place; every rank gets the same bits. It returns when all have contributed."""
        ...

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Rank 0: the ranks' columns side by side, `[R, sum(widths)]`; rank i has `widths[i]`. None elsewhere."""
        ...
