"""A CUDA device from any thread: a stream of one's own without touching another device, and a little memory.

`torch.cuda.stream` alone sets the device back to the thread's when it is left. For a thread that never set one that is
device 0, and setting it makes a context there: half a GiB of a card that belongs to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Within it the stream and its device are current; without a stream (a CPU) nothing is."""
    if stream is None:
        yield
        return
    # The outer one sets the device back, too, but to one without a context it does not.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def device_bytes(device: str, nbytes: int) -> torch.Tensor:
    """Zeros, uint8."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
