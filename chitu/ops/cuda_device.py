"""Use of a CUDA device from any thread: a stream without touching another device, and a little memory.

On exit, `torch.cuda.stream` alone restores the thread's device. For a thread that never set one that is device 0, and
setting it creates a context there: half a GiB of a card that belongs to other processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make the stream and its device current. Do nothing without a stream (on a CPU)."""
    if stream is None:
        yield
        return
    # The outer one restores the device too, but not to a device without a context.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def device_bytes(device: str, nbytes: int) -> torch.Tensor:
    """Return `nbytes` zero bytes on the device."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
