"""`PagedKVCacheManager`: the page tables of an instance. Step thread only, torch-free.

A room's pages are *reserved* (its own forward or a peer fills them), may be *in transfer* (a peer writes them),
and *quarantined* when the room is dead but the peer is not known to have stopped. `remove_task` ends all of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from chitu.errors import Internal
from chitu.kv_cache.page_allocator import PageAllocator


class PagedKVCacheManager:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._tables: dict[bytes, list[int]] = {}
        self._in_transfer: set[bytes] = set()
        self._quarantined: set[bytes] = set()

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    @property
    def num_used_pages(self) -> int:
        return self._allocator.num_used

    @property
    def num_quarantined_pages(self) -> int:
        return self._allocator.num_quarantined

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def get_page_indices(self, room: bytes) -> Sequence[int]:
        """The room's pages in token order; empty for an unknown room."""
        return self._tables.get(room, ())

    def reserve(self, room: bytes, num_tokens: int) -> list[int]:
        """Grow the room's table until it holds `num_tokens`; the new pages. Capacity, and nothing taken, when short."""
        table = self._tables.get(room, [])
        missing = self.pages_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        pages = self._allocator.reserve(missing, after=table[-1] if table else -1)
        self._tables.setdefault(room, table).extend(pages)
        return pages

    def reserve_for_transfer(self, room: bytes, num_tokens: int) -> list[int]:
        """`reserve`, for pages that a peer will write: they cannot be freed before the writer is known to be done."""
        pages = self.reserve(room, num_tokens)
        self._in_transfer.add(room)
        return pages

    def insert_kv_cache_from_transfer(self, room: bytes, page_indices: Sequence[int], prefix_length: int) -> None:
        """The peer wrote `prefix_length` tokens into these pages: they are the room's own now."""
        if room not in self._in_transfer:
            raise Internal("KV arrived for a room that expects none")
        if list(page_indices) != self._tables[room][: self.pages_for(prefix_length)]:
            raise Internal("KV arrived in other pages than were reserved")
        self._in_transfer.discard(room)

    def quarantine(self, room: bytes) -> None:
        """The room is dead, its pages may still be written or read by a peer. `remove_task` frees them. Idempotent."""
        if room in self._tables and room not in self._quarantined:
            self._quarantined.add(room)
            self._allocator.quarantine(self._tables[room])

    def remove_task(self, room: bytes) -> None:
        """Free the room's pages. The caller knows that no peer touches them. Idempotent."""
        pages = self._tables.pop(room, None)
        self._in_transfer.discard(room)
        self._quarantined.discard(room)
        if pages:
            self._allocator.release(pages)

    def check_idle(self) -> None:
        """Raise Internal unless every page is free: called when no request is left."""
        if self._tables or self.num_free_pages != self.num_pages:
            raise Internal(
                f"{len(self._tables)} page tables left, {self.num_free_pages} of {self.num_pages} pages free"
            )
