"""Single bytes that arrive flipped: what `faulty/transfer_engine.py` does to every Nth write.

After the correct write one byte of it is written again, flipped, from a small buffer that the wrapped transport has
registered. The source stays as it is, so P's checksums are of what was meant. The byte is the upper one of a 4 byte
word (sign and exponent of a float32, or of one of two bfloat16), so that a flip is no rounding error. For pools in host
memory only: the byte is read by its address.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time

import numpy as np

from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport

logger = logging.getLogger(__name__)

WORD_BYTES = 4
AUX_PADDING_BYTES = 64
"""Bytes at the end of an aux row that may be padding, which is never read."""


class EveryNth:
    """Counter that strikes at every Nth call, from any thread. 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        if not self._every:
            return False
        with self._lock:
            self._count += 1
            return self._count % self._every == 0


class ByteFlipper:
    """Flips bytes of finished writes. Several transfer threads call `flip`."""

    def __init__(self, inner: Transport, kv_every: int, logits_every: int) -> None:
        self._inner = inner
        self._kv_writes = EveryNth(kv_every)
        self._logits_writes = EveryNth(logits_every)
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._scratch = np.zeros(1, np.uint8)
        self._is_prepared = False

    def prepare(self) -> None:
        """Register the buffer, before the first write."""
        if not self._is_prepared:
            self._inner.register(int(self._scratch.ctypes.data), 1)
            self._is_prepared = True

    def flip(self, peer: PeerHandle, copies: CopyList, aux_rows: range, deadline_s: float) -> None:
        """Flip a byte of this write, which is over, if it is its turn. Raises errors of the wrapped transport."""
        if not len(copies.src):
            return
        is_aux = copies.dst[0] in aux_rows
        if not (self._logits_writes if is_aux else self._kv_writes).strikes():
            return
        with self._lock:
            index = self._random.randrange(len(copies.src))
            first, end = 0, copies.length[index]
            if is_aux:
                first, end = AUX_HEADER_BYTES, max(AUX_HEADER_BYTES + WORD_BYTES, end - AUX_PADDING_BYTES)
            word = self._random.randrange(max(1, (end - first) // WORD_BYTES))
            offset = min(first + word * WORD_BYTES + WORD_BYTES - 1, end - 1)
            self._scratch[0] = ctypes.c_uint8.from_address(copies.src[index] + offset).value ^ 0xFF
            one = CopyList([int(self._scratch.ctypes.data)], [copies.dst[index] + offset], [1])
            self._inner.write(peer, one, max(0.0, deadline_s - time.monotonic()))
        logger.warning("faults: flipped a byte of %s written to %s", "logits" if is_aux else "KV", peer.session_id)
