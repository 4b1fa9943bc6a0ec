"""`PagedKVCacheManager`: the page tables of an instance, and its prefix cache. Step thread only, torch-free.

A room's pages are *reserved* (its own forward or a peer fills them). They may be *in transfer* (a peer writes them),
and are *quarantined* if the room is dead but its peer may not have stopped. `remove_task` ends all of that.

With a `fingerprint` full pages outlive their room. A room begins with the cached pages of its prompt (`begin`), which
other rooms may share and none writes again. `commit` adds the room's own pages that are full and settled to the cache.
Invariants: a page belongs to one room (*private*), to the prefix index and the rooms that pinned it there, or to
neither; only private pages are written to, quarantined or handed to a peer that writes. A cached page without a user
counts as available: `reserve` evicts it if there are not enough free pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from chitu.errors import Capacity, Internal
from chitu.kv_cache.kv_events import KVEventLog
from chitu.kv_cache.page_allocator import PageAllocator
from chitu.kv_cache.prefix_index import PageKeys, PrefixIndex
from chitu.kv_cache.state_row import StateSlots


@dataclass(slots=True)
class _Room:
    table: list[int] = field(default_factory=list)
    """The room's pages in token order."""
    pinned: list[int] = field(default_factory=list)
    """Pages in the index, under the keys of the room's first pages. Usually the head of `table`. If two rooms computed
    a page at the same time, the index may hold the other room's copy while `table` keeps the private one."""

    def private(self) -> list[int]:
        num_pinned = len(self.pinned)
        if self.table[:num_pinned] == self.pinned:
            return self.table[num_pinned:]
        own = [page for page, pinned in zip(self.table, self.pinned, strict=False) if page != pinned]
        return own + self.table[num_pinned:]


class PagedKVCacheManager:
    """The page tables of all rooms. `page_size` is in tokens. `fingerprint` enters the key of every page
    (`prefix_index.py`); if it is None, nothing is cached."""

    def __init__(self, num_pages: int, page_size: int, fingerprint: bytes | None = None) -> None:
        self.page_size = page_size
        self._fingerprint = fingerprint
        self._may_cache = True
        self._epoch = 0
        """Number of flushes since the start."""
        self.allocator = PageAllocator(num_pages)
        """States of the pages, for readers of their numbers; cached are those that no room uses at the moment."""
        self._index = PrefixIndex(num_pages)
        self.states: StateSlots | None = None
        """Of a model with recurrent state: the snapshots behind which its prompts may go on. None without state."""
        self._rooms: dict[bytes, _Room] = {}
        self._in_transfer: set[bytes] = set()
        self._quarantined: set[bytes] = set()
        self.on_cached: Callable[[Sequence[bytes], int, Sequence[int]], None] | None = None
        """Called with pages new to the cache: the keys of a sequence's first pages, the position of the first new one,
        and the new pages."""
        self.events: KVEventLog | None = None
        """Notes which keys enter and leave the cache; None: nobody asks."""
        self.hit_tokens = 0
        """Prompt tokens that rooms found in the cache since the start."""
        self.evictions = 0
        """Cached pages that were evicted for another room since the start."""

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_available_pages(self) -> int:
        """Number of pages that `reserve` can give: the free ones and the cached ones without a user."""
        return self.allocator.num_free + self.allocator.num_cached

    @property
    def num_shared_pages(self) -> int:
        """Upper bound of the entries in all page tables whose page is counted for another room already."""
        return self._index.num_shared_pins

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def get_page_indices(self, room: bytes) -> Sequence[int]:
        """Return the room's pages in token order; empty for an unknown room."""
        found = self._rooms.get(room)
        return found.table if found is not None else ()

    # -------------------------------------------------------------------------------------------------------- own pages

    def reserve(self, room: bytes, num_tokens: int) -> list[int]:
        """Grow the room's table to `num_tokens` and return the new pages. Raise Capacity, and take none, if short."""
        found = self._rooms.get(room) or _Room()
        table = found.table
        missing = self.pages_for(num_tokens) - len(table)
        if missing <= 0:
            return []
        if missing > self.num_available_pages:
            raise Capacity(f"{missing} pages wanted, {self.num_available_pages} of {self.num_pages} are available")
        short = missing - self.allocator.num_free
        if short > 0:
            gone: list[bytes] | None = None if self.events is None else []
            self.allocator.release(self._index.evict(short, gone))
            if self.events is not None and gone:
                self.events.removed(gone)
            self.evictions += short
        pages = self.allocator.reserve(missing, after=table[-1] if table else -1)
        self._rooms.setdefault(room, found).table.extend(pages)
        return pages

    def reserve_for_transfer(self, room: bytes, num_tokens: int) -> list[int]:
        """Reserve pages that a peer will write: they cannot be freed before the writer is known to be done."""
        pages = self.reserve(room, num_tokens)
        self._in_transfer.add(room)
        return pages

    def insert_kv_cache_from_transfer(self, room: bytes, page_indices: Sequence[int], prefix_length: int) -> None:
        """End the transfer: the peer wrote `prefix_length` tokens to these pages, which are now the room's own."""
        if room not in self._in_transfer:
            raise Internal("KV arrived for a room that expects none")
        if list(page_indices) != self._rooms[room].table[: self.pages_for(prefix_length)]:
            raise Internal("KV arrived in pages other than those reserved")
        self._in_transfer.discard(room)

    def quarantine(self, room: bytes) -> None:
        """Quarantine a dead room's pages, which a peer may still access. `remove_task` frees them. Idempotent."""
        if room in self._rooms and room not in self._quarantined:
            self._quarantined.add(room)
            self.allocator.quarantine(self._rooms[room].private())

    def remove_task(self, room: bytes) -> None:
        """Free the room's private pages and unpin the rest, which become idle if no other room uses them. The caller
        knows that no peer touches them. Idempotent."""
        found = self._rooms.pop(room, None)
        self._in_transfer.discard(room)
        self._quarantined.discard(room)
        if found is None:
            return
        idle, dropped = self._index.unpin(found.pinned)
        if idle:
            self.allocator.cache(idle)
        gone = found.private() + dropped
        if gone:
            self.allocator.release(gone)

    def pages_coming_back(self) -> Callable[[bytes], int]:
        """Return a function that counts the pages `num_available_pages` gains if a room gives way, in addition to the
        rooms passed to it before. Changes nothing."""
        taken: dict[int, int] = {}

        def coming_back(room: bytes) -> int:
            found = self._rooms.get(room)
            if found is None:
                return 0
            count = len(found.private())
            for page in found.pinned:
                taken[page] = taken.get(page, 0) + 1
                count += taken[page] == self._index.num_pins(page)
            return count

        return coming_back

    # ------------------------------------------------------------------------------------------------- the prefix cache

    @property
    def caches(self) -> bool:
        """Whether pages outlive their rooms."""
        return self._fingerprint is not None

    def page_keys(
        self, cache_salt: str, adapter_hash: str = "", images: Sequence[tuple[int, bytes]] = (), adapter: str = ""
    ) -> PageKeys | None:
        """Return the keys for the pages of one sequence; None if nothing is cached. Other arguments: see
        `PageKeys.of`."""
        if self._fingerprint is None:
            return None
        return PageKeys.of(self._fingerprint, self.page_size, cache_salt, adapter_hash, self._epoch, images, adapter)

    def accepts(self, keys: PageKeys | None) -> TypeGuard[PageKeys]:
        """Return whether pages are found and cached under these keys. Those from before a flush are not accepted: their
        sequence may have computed with other weights, or behind damaged pages."""
        return keys is not None and keys.epoch == self._epoch

    def begin(self, room: bytes, keys: PageKeys | None, prompt: bytes, to_compute: int = 1) -> int:
        """Start a new room with the cached pages of its `prompt` (int32 LE). Return how many tokens these hold. They
        never include the last `to_compute` tokens: the last one's logits are needed."""
        pages = self._find(keys, prompt, to_compute)
        if not pages:
            return 0
        if room in self._rooms:
            raise Internal("a room with pages begins again")
        self._pin(pages)
        self._rooms[room] = _Room(pages, list(pages))
        self.hit_tokens += len(pages) * self.page_size
        return len(pages) * self.page_size

    def fork(self, room: bytes, source: bytes, num_tokens: int) -> None:
        """Start a room with the full pages of the first `num_tokens` of `source`, which are settled. Both rooms use
        them from now on. Pages that the new room has already follow them."""
        origin, count = self._rooms[source], num_tokens // self.page_size
        if source in self._in_transfer or source in self._quarantined:
            raise Internal("a room is forked that a peer may still write to")
        for page in origin.table[len(origin.pinned) : count]:  # shared, but not found by key
            self._index.share(page)
            origin.pinned.append(page)
        found = self._rooms.setdefault(room, _Room())
        if found.pinned:
            raise Internal("a room with shared pages begins again")
        found.pinned = origin.pinned[:count]
        found.table[:0] = found.pinned
        self._pin(found.pinned)

    def holds(self, key: bytes) -> bool:
        """Return whether a page with this key is cached."""
        return key in self._index

    def known_tokens(self, keys: PageKeys | None, prompt: bytes) -> int:
        """Return how many tokens of a prompt `begin` would find now."""
        return len(self._find(keys, prompt, 1)) * self.page_size

    def pages_wanted(self, keys: PageKeys | None, prompt: bytes, to_compute: int = 1) -> int:
        """Return how many available pages a room with this prompt would take: all except those that are in use."""
        wanted = self.pages_for(len(prompt) // 4)
        return wanted - sum(self._index.num_pins(page) > 0 for page in self._find(keys, prompt, to_compute))

    def commit(
        self, room: bytes, keys: PageKeys | None, token_ids: bytes, num_tokens: int, is_copy: bool = False
    ) -> None:
        """Cache the full pages of the first `num_tokens` of the room's `token_ids`. Their K and V are in the pages for
        good: tokens of an unread step do not count. A room that a peer may still write to caches nothing. If `is_copy`,
        another instance has these pages, so `on_cached` is not called."""
        found = self._rooms.get(room)
        if found is None or not self.accepts(keys) or room in self._in_transfer or room in self._quarantined:
            return
        pinned, num_full = found.pinned, num_tokens // self.page_size
        if num_full <= len(pinned):
            return
        names, num_known, new = keys.upto(num_full, token_ids), len(pinned), list[int]()
        for position in range(num_known, num_full):
            own = found.table[position]
            known = self._index.add(names[position], own)
            if known != own:
                self._pin([known])
            elif self.events is not None:
                new.append(position)
            pinned.append(known)
        if self.events is not None and new:
            self.events.stored(keys, names, new, token_ids)
        if self.on_cached is not None and not is_copy:
            self.on_cached(names, num_known, pinned[num_known:])

    def generation(self, page: int) -> int:
        """Return a number that changes once the content of this page can no longer be found; from then on it may be
        overwritten. Any thread."""
        return self._index.generation(page)

    def use_fingerprint(self, fingerprint: bytes | None) -> None:
        """Drop all cached pages and snapshots, and make the keys of sequences from now on with another fingerprint."""
        self._fingerprint = fingerprint if self._may_cache else None
        self.flush()

    def stop_caching(self) -> None:
        """Drop all cached pages and snapshots, and cache nothing from now on, whatever the fingerprint."""
        self._may_cache = False
        self.use_fingerprint(None)

    def flush(self) -> None:
        """Drop all cached pages and snapshots. Rooms keep the pages that they use, but no new room finds them, and what
        sequences of before compute is not cached: keys that were made up to now are not accepted any more."""
        self._epoch += 1
        if self.states is not None:
            self.states.drop_all()
        if self.events is not None:
            self.events.cleared()
        dropped = self._index.flush()
        if dropped:
            self.allocator.release(dropped)

    def _find(self, keys: PageKeys | None, prompt: bytes, to_compute: int) -> list[int]:
        if not self.accepts(keys):
            return []
        names = keys.upto((len(prompt) // 4 - to_compute) // self.page_size, prompt)
        pages = self._index.find(names)
        if self.states is None:
            return pages
        count = len(pages)
        while count and not self.states.find(names[count - 1], count * self.page_size, prompt):
            count -= 1
        return pages[:count]

    def _pin(self, pages: Sequence[int]) -> None:
        were_idle = self._index.pin(pages)
        if were_idle:
            self.allocator.use_cached(were_idle)

    def check_idle(self) -> None:
        """Raise Internal unless every page is free or cached: called when no request is left."""
        num_free, num_cached = self.allocator.num_free, self.allocator.num_cached
        if self._rooms or num_free + num_cached != self.num_pages:
            raise Internal(
                f"{len(self._rooms)} page tables left, {num_free} pages free and {num_cached} cached of "
                f"{self.num_pages}"
            )
        self._index.check_unused(num_cached)
