"""What a rank gives back while it sleeps: the memory of its pools, and that of the weights.

Both keep their addresses. The kernel takes the pages behind them and gives zeros when they are touched again. So peers
that have a pool mapped, and kernels that know the address of a weight, notice nothing, and a model that is read later
is compared with the tensors as usual (`tensors.why_unlike`). Before weights leave a digest is taken of each tensor, and
those that are read again must have the same. On CPUs only: the memory of a GPU goes with its addresses, which recorded
steps and the mappings of peers have.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from chitu.kv_cache.pool import KVPool
from chitu.models.tensors import tensors_of

PAGE_BYTES = mmap.PAGESIZE
BLOCK_BYTES = 32 << 10
"""Bytes of a tensor that one number of its digest stands for."""
ON_GPU = "on a GPU no memory is given back: recorded steps, and the mappings of peers, need its addresses"


class SleepingWeights:
    """The weights of one rank: what they were, while their memory is gone. Step thread, but for `why_other`."""

    def __init__(self, model: Any) -> None:
        """Give the memory of a model's tensors back. Nothing computes with it any more."""
        self._digests = digests_of(model)
        storages = {each.data_ptr(): each.nbytes() for each in _storages_of(model)}
        self.num_bytes = sum(give_back_range(base, nbytes) for base, nbytes in storages.items())
        trim()

    def why_other(self, model: Any) -> str:
        """Return how the numbers of a model that was read again differ from those given back; empty if they do
        not."""
        for name, digest in digests_of(model).items():
            if self._digests.get(name) != digest:
                return f"{name} has other numbers than before the sleep"
        return ""


def _storages_of(model: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for _, tensor in tensors_of(model))


def give_back_range(base: int, nbytes: int) -> int:
    """Give the whole pages of a range of private host memory back to the system. They read as zeros from now on. Return
    their bytes. Raises OSError."""
    first, end = -(-base // PAGE_BYTES) * PAGE_BYTES, (base + nbytes) // PAGE_BYTES * PAGE_BYTES
    if end <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"{end - first} bytes at {first:#x} could not be given back")
    return end - first


def digests_of(model: Any) -> Mapping[str, bytes]:
    """Return a digest of each tensor's bits: equal numbers have equal ones, and another one in a tensor, or another
    order of its parts, changes it."""
    return {name: _digest(tensor) for name, tensor in tensors_of(model)}


def _digest(tensor: torch.Tensor) -> bytes:
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(octets) // BLOCK_BYTES * BLOCK_BYTES
    digest = blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(octets[:whole].view(np.int64).reshape(-1, BLOCK_BYTES // 8).sum(1).tobytes())
    digest.update(octets[whole:].tobytes())
    return digest.digest()


def give_back_pools(pools: Sequence[KVPool]) -> tuple[int, str]:
    """Give the memory of pools back. Return the bytes, and what stays and why."""
    kept = sorted({pool.pinned_by for pool in pools if pool.pinned_by})
    return sum(pool.give_back() for pool in pools), f"KV pages: {', '.join(kept)} pins their memory" if kept else ""


def trim() -> None:
    """Have the C library return what was freed to the system: it keeps some for later."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
