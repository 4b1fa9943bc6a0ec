"""A page outside the pool, as bytes: a header that says which page it is, and K and V of all layers of this rank.

Pure. The header has the page's content key, and a CRC-32 of key and content: a record that was cut off, mixed up or
changed by accident is told apart (of other content one in 2**32 passes). It does not protect from somebody who changes
records on purpose: whoever can write to a store is trusted.
"""

from __future__ import annotations

import struct
import zlib

from chitu.kv_cache.page_keys import KEY_BYTES

_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"chituKV1"
HEADER_BYTES = 64
"""The content begins on a cache line."""


def seal(record: memoryview, key: bytes) -> None:
    """The content is there: write the header of it."""
    content = record[HEADER_BYTES:]
    _HEADER.pack_into(record, 0, _MAGIC, key, len(content), _checksum(key, content))


def is_whole(record: memoryview, key: bytes) -> bool:
    """Whether this is the page of `key`, unchanged."""
    content = record[HEADER_BYTES:]
    if len(record) < HEADER_BYTES:
        return False
    magic, its_key, nbytes, checksum = _HEADER.unpack_from(record)
    return (magic, its_key, nbytes) == (_MAGIC, key, len(content)) and checksum == _checksum(key, content)


def _checksum(key: bytes, content: memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(key))
