"""Picks the implementation of `Ops` for a device and a dtype."""

from __future__ import annotations

import torch

from chitu.ops.interface import Ops
from chitu.ops.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest that works here."""
    return TorchOps()
