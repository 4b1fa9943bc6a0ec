"""Types of messages that several threads may read first at the same time: msgspec (0.22) collects what it knows of a
type at its first use, without a lock, and two threads that do so at once crash the process."""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_known: set[object] = set()
_lock = threading.Lock()


def known(kind: type[T]) -> type[T]:
    """Return the type, of which msgspec knows all that it needs to read it."""
    if kind not in _known:
        with _lock:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return kind
