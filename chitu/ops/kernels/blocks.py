"""Copies many scattered pieces of memory in one launch, for transfers between processes of one host.

Libraries cost 6 to 15 us a piece (measured with 64 KiB pieces); one launch for all pieces is nearly as fast as a
contiguous copy. Addresses are numbers: the destination is memory of another process, mapped into ours.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from chitu.ops.cuda_device import on_stream
from chitu.types import Ready

PIECE_BYTES = 64 << 10
"""Longest piece. Longer copies are split, so that all programs have about the same work."""
WORDS_AT_ONCE = 1024

Int64s = NDArray[np.int64]


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_pieces(pieces_ptr, num_pieces, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Program (piece, part of it). `pieces`: source addresses, destination addresses and lengths in words."""
    piece = tl.program_id(0)
    source = tl.load(pieces_ptr + piece)
    target = tl.load(pieces_ptr + num_pieces + piece)
    length = tl.load(pieces_ptr + 2 * num_pieces + piece)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if WORD_BYTES == 8:
        # Addresses and lengths of such pieces are multiples of 16 bytes, so the compiler can copy two words at once. It
        # loses a hint on a number when that is cast to a pointer, so the hint is on the pointer.
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        is_there = words < tl.multiple_of(length, 2)
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=is_there), mask=is_there)
    elif WORD_BYTES == 4:
        source_ptr = source.to(tl.pointer_type(tl.int32))
        target_ptr = target.to(tl.pointer_type(tl.int32))
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=words < length), mask=words < length)
    else:
        source_ptr = source.to(tl.pointer_type(tl.int8))
        target_ptr = target.to(tl.pointer_type(tl.int8))
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=words < length), mask=words < length)


def cut(src_N: Int64s, dst_N: Int64s, length_N: Int64s, piece_bytes: int = PIECE_BYTES) -> Int64s:
    """Split copies into pieces of at most `piece_bytes`, `[3, pieces]`: sources, destinations, lengths in bytes."""
    if not length_N.size or (length_N.min() > 0 and length_N.max() <= piece_bytes):  # pages: no need
        return np.stack([src_N, dst_N, length_N])
    pieces_N = -(-length_N // piece_bytes)
    copy_of = np.repeat(np.arange(len(length_N)), pieces_N)
    offset = (np.arange(len(copy_of)) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)) * piece_bytes
    length = np.minimum(length_N[copy_of] - offset, piece_bytes)
    return np.stack([src_N[copy_of] + offset, dst_N[copy_of] + offset, length])


def word_bytes_of(pieces: Int64s) -> int:
    """Return the widest word in which all pieces can be copied: 8 if all are aligned to 16, else 4, else 1."""
    combined = int(np.bitwise_or.reduce(pieces, axis=None)) if pieces.size else 0
    return 8 if combined % 16 == 0 else 4 if combined % 4 == 0 else 1


class BlockCopier:
    """A copier on one device. Thread-safe: each thread has its own stream, so the waits of one do not delay the others.
    `copy` returns when the bytes have arrived."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._local = threading.local()

    def warm_up(self) -> None:
        """Compile the kernel for every word width; otherwise the first transfers would wait for it."""
        memory = torch.zeros(64, dtype=torch.uint8, device=self._device)
        for length in (16, 4, 1):
            source = np.array([memory.data_ptr()], dtype=np.int64)
            self.copy(source, source + 32, np.array([length], dtype=np.int64))

    def copy(self, src_N: Int64s, dst_N: Int64s, length_N: Int64s, after: Sequence[Ready] = ()) -> None:
        """Copy `length_N[i]` bytes from address `src_N[i]` to `dst_N[i]`. The device must be able to use all addresses.

        The copies start on the device when all of `after` have passed; preparation does not wait for them.
        """
        pieces = cut(src_N, dst_N, length_N)
        if not pieces.shape[1]:
            return
        word_bytes = word_bytes_of(pieces)
        pieces[2] //= word_bytes
        parts = triton.cdiv(int(pieces[2].max()), WORDS_AT_ONCE)
        stream = self._stream()
        with on_stream(stream):
            pieces_3N = self._uploaded(pieces)
            for ready in after:
                if stream is None:
                    ready.synchronize()
                else:
                    ready.wait(stream)
            kernel: Any = _copy_pieces[(pieces.shape[1], parts)]
            kernel(pieces_3N, pieces.shape[1], WORD_BYTES=word_bytes, BLOCK=WORDS_AT_ONCE, num_warps=4)
            if stream is not None:
                done = torch.cuda.Event(blocking=bool(after))  # type: ignore[no-untyped-call]  # sleeps if it is long
                done.record(stream)
                done.synchronize()

    def _uploaded(self, pieces: Int64s) -> torch.Tensor:
        host = torch.from_numpy(pieces)
        if self._device.type != "cuda":
            return host.to(self._device)
        return host.pin_memory().to(self._device, non_blocking=True)  # from other memory the host would wait for it

    def _stream(self) -> torch.cuda.Stream | None:
        """Return the stream of the calling thread; None on a CPU."""
        if self._device.type != "cuda":
            return None
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream
