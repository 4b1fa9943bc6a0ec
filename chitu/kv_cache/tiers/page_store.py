"""`PageStore`: the interface of disk and remote stores. One thread calls a store, which may block.

Records are those of `record.py`. A store may lose, change or forge them: the caller verifies what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(Exception):
    """The store does not work at the moment; the message says why."""


class PageStore(Protocol):
    """A store of page records. Every method may raise StoreError or OSError, except `may_have`."""

    def may_have(self, key: bytes) -> bool:
        """Return False if `store_get` would find nothing. Any thread; returns at once and never raises."""
        ...

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Store these records. The store may omit some."""
        ...

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Fill `records` with those of `keys`, in order, up to the first missing one. Return how many were filled."""
        ...

    def forget(self, key: bytes) -> None:
        """Remove the record of this key: what `store_get` returned is not its page."""
        ...

    def touch(self, chain: Sequence[bytes]) -> None:
        """Mark these as used; the first one counts as the most recent."""
        ...

    def clear(self) -> None:
        """Remove this instance's own records, because an operator flushed the cache."""
        ...

    def close(self) -> None: ...
