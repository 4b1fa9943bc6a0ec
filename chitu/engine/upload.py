"""Copies small tensors from the host to the device of the step, without a wait. Step thread.

A copy from pageable memory waits until all that was launched before it is done, so the next step could not be launched
while one runs. A copy from pinned memory is one more operation in the queue; torch keeps such memory until the copy has
run, and then reuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a tensor of these numbers on `device`, for operations launched from now on."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_tensor(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on `device`, as `upload` does."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
