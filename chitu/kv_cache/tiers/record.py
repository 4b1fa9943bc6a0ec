"""A page outside the pool, as bytes: a header that identifies the page, then K and V of all layers and KV heads.

Pure. The header has the page's content key, and a CRC-32 of key and content. It detects a record that is truncated,
mixed up or damaged by accident (one in 2**32 passes). It does not protect from deliberate changes: every process that
can write to a store is trusted.
"""

from __future__ import annotations

import struct
import zlib

from chitu.kv_cache.page_keys import KEY_BYTES

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"chituKV1"
HEADER_BYTES = 64
"""Size of the header; the content begins on a cache line."""


def seal(record: memoryview, key: bytes) -> None:
    """Write the header of a record whose content is complete."""
    content = record[HEADER_BYTES:]
    _HEADER.pack_into(record, 0, _MAGIC, key, len(content), _checksum(key, content))


def is_whole(record: memoryview, key: bytes) -> bool:
    """Return whether this is the page of `key`, unchanged."""
    content = record[HEADER_BYTES:]
    if len(record) < HEADER_BYTES:
        return False
    magic, its_key, nbytes, checksum = _HEADER.unpack_from(record)
    return (magic, its_key, nbytes) == (_MAGIC, key, len(content)) and checksum == _checksum(key, content)


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))
