"""Small tensors from the host to where the step computes, without a wait. Step thread.

A copy from pageable memory waits until all that was launched before it is done, and the next step would be launched
behind the one that runs, not beside it. From pinned memory it is one more operation in the queue; torch keeps such
memory until the copy has run, and hands it out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of these numbers on `device`, for what is launched from now on."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_tensor(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same of a tensor in host memory."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
