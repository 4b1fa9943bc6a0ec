"""Aux slots: one row per request between P and D, a 64 byte header and then the logits of the prompt's last token.

Owns the header, and which slots are free. P seals a row once its logits are in place, the row crosses as one copy, D
verifies it before it samples from it. The header names the room and carries a checksum, so a row that is stale, torn or
of another room never verifies. `allocate` and `free` belong to the step thread; any thread that has the slot may call
`seal` and `verify`. The rows themselves live in the pool's arena (`KVPool.aux_rows`), on its device. The checksum is
always computed on the host: of the row if it is in host memory, else of a copy.

Header, little endian: magic (8 bytes), version u32, checksum u32 (CRC-32 of the logits, seeded with the number that
follows the room; measured 3.2 GB/s against 2.8 of Adler-32), logits length in bytes u64, room (16 bytes), number of
prompt tokens that P had cached u32; the rest is zero.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from chitu.errors import Integrity
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, HostRows, RowMemory
from chitu.types import room_text

HEADER = struct.Struct("<8sIIQ16sI")
MAGIC = b"chituAUX"
VERSION = 2


class MetadataBuffers:
    """Free list and headers over `rows`: uint8 `[num_slots, row_bytes]`, writable, row-contiguous, or a `RowMemory`.

    `logits_bytes`: 4 * vocab_size, the part of a row behind the header that the checksum covers.
    """

    def __init__(self, rows: NDArray[np.uint8] | RowMemory, logits_bytes: int) -> None:
        self._rows: RowMemory = HostRows(rows) if isinstance(rows, np.ndarray) else rows
        if not 0 < logits_bytes <= self._rows.row_bytes - AUX_HEADER_BYTES:
            raise ValueError(f"{logits_bytes} bytes of logits do not fit in rows of {self._rows.row_bytes} bytes")
        self._logits_bytes = logits_bytes
        self._free = list(range(self._rows.num_rows - 1, -1, -1))
        self._used = [False] * self._rows.num_rows

    @property
    def num_slots(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Return a slot whose row cannot verify before it is sealed or written anew, or None if all are taken."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used[slot] = True
        self.clear(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises ValueError for a slot that is not allocated: freeing twice is a bug."""
        self._check(slot)
        if not self._used[slot]:
            raise ValueError(f"aux slot {slot} is free already")
        self._used[slot] = False
        self._free.append(slot)

    def get(self, slot: int) -> NDArray[np.float32]:
        """Return the slot's logits, float32 `[vocab_size]`: a view of the row, or of a copy if it is on a device."""
        self._check(slot)
        return self._rows.read(slot, AUX_HEADER_BYTES, AUX_HEADER_BYTES + self._logits_bytes).view(np.float32)

    def clear(self, slot: int) -> None:
        """Wipe the header: the row cannot verify until it is sealed or written anew."""
        self._check(slot)
        self._rows.write(slot, bytes(AUX_HEADER_BYTES))

    def seal(self, slot: int, room: bytes, cached_tokens: int = 0) -> None:
        """Write the header, on P, once the logits are in place. The row must not change from then until it is sent."""
        if len(room) != 16:
            raise ValueError(f"a room of {len(room)} bytes")
        self.clear(slot)
        payload = self._rows.read(slot, AUX_HEADER_BYTES, AUX_HEADER_BYTES + self._logits_bytes)
        checksum = zlib.crc32(payload.data, cached_tokens)
        header = HEADER.pack(MAGIC, VERSION, checksum, self._logits_bytes, room, cached_tokens)
        self._rows.write(slot, header)

    def verify(self, slot: int, room: bytes) -> int:
        """Verify a row on D, after P reported it written, and return how many tokens P had cached. Raises Integrity
        naming what differs."""
        self._check(slot)
        row = self._rows.read(slot, 0, AUX_HEADER_BYTES + self._logits_bytes)
        magic, version, checksum, logits_bytes, row_room, cached_tokens = HEADER.unpack_from(row.data, 0)
        where = f"aux slot {slot} of room {room_text(room)}"
        if magic != MAGIC:
            raise Integrity(f"{where}: no row was written (magic {magic!r}, expected {MAGIC!r})")
        if version != VERSION:
            raise Integrity(f"{where}: version {version}, expected {VERSION}")
        if row_room != room:
            raise Integrity(f"{where}: the row belongs to room {room_text(row_room)}")
        if logits_bytes != self._logits_bytes:
            raise Integrity(f"{where}: {logits_bytes} bytes of logits, expected {self._logits_bytes}")
        actual = zlib.crc32(row[AUX_HEADER_BYTES:].data, cached_tokens)
        if actual != checksum:
            raise Integrity(f"{where}: checksum of the logits is {actual:#010x}, the header says {checksum:#010x}")
        return int(cached_tokens)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self._used):
            raise ValueError(f"aux slot {slot} of {len(self._used)}")
