"""`PageStore`: what disk and remote stores are to the tiers. One thread calls a store; it may take its time.

Records are those of `record.py`. A store may lose, change or forge them: what it gives is verified by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(Exception):
    """The store does not work at the moment, as the message says."""


class PageStore(Protocol):
    """Every method may raise StoreError or OSError."""

    def may_have(self, key: bytes) -> bool:
        """Any thread, at once, and never raises: False where `store_get` would bring nothing."""
        ...

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        """Keep these; of some it may keep none."""
        ...

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Fill `records` with those of `keys`, in order, up to the first that it has not: how many."""
        ...

    def forget(self, key: bytes) -> None:
        """What `store_get` gave is not the page of this key."""
        ...

    def touch(self, chain: Sequence[bytes]) -> None:
        """These were used, the first one last."""
        ...

    def clear(self) -> None:
        """An operator wants what is cached forgotten, as far as it is this instance's own."""
        ...

    def close(self) -> None: ...
