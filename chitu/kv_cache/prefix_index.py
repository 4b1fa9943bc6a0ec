"""Which page holds what: the pages that later prompts may begin with, by content key.

Owned by `PagedKVCacheManager`, step thread only. Pure: keys and page numbers in, page numbers out; no tokens, no clock.
A page is *pinned* by the requests that use it, and *idle* while nobody does. Everything costs O(pages touched).

Most pages are never wanted again, so idle pages are evicted by a form of 2Q (T. Johnson and D. Shasha, 1994): those
that came again, in the index or within as many evictions as there are pages, are *protected* while they are a third of
all pages at most. The oldest of more becomes the newest of the others, and these go first, by their last use.

Whoever pins a page pins all pages before it in its chain, and lets go of them last page first. When a page comes again,
so have all before it. So no page goes before those behind it in its chain: eviction never cuts a chain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from chitu.errors import Internal

PROTECTED = 3
"""One in so many pages."""


class PrefixIndex:
    """Of pages `0 .. num_pages - 1`. Memory: some 370 bytes a page at most."""

    def __init__(self, num_pages: int) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_pages
        """None: not in the index, or not any more while somebody still uses it."""
        self._pins = array("i", bytes(4 * num_pages))
        # The idle pages as two rings in both directions. The oldest is behind the head: `_head`, or `_protected_head`.
        self._head, self._protected_head = num_pages, num_pages + 1
        self._next = array("i", range(num_pages + 2))
        self._prev = array("i", range(num_pages + 2))
        self._came_again = bytearray(num_pages)
        self._is_protected = bytearray(num_pages)
        """In that ring."""
        self._num_protected = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Keys; the oldest first."""
        self._generations = array("Q", bytes(8 * num_pages))
        self.num_idle = 0
        self.num_shared_pins = 0
        """Pins beyond the first of each page."""

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._pages)

    def num_pins(self, page: int) -> int:
        return self._pins[page]

    def generation(self, page: int) -> int:
        """Of what the page holds: another number as soon as it cannot be found any more, which is before anybody may
        write to it again. Any thread."""
        return self._generations[page]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest beginning of this chain that is here."""
        found: list[int] = []
        for page in map(self._pages.get, keys):
            if page is None:
                break
            found.append(page)
        return found

    def pin(self, pages: Sequence[int]) -> list[int]:
        """They are used by one more request; `pages` came from `find`. Those that were idle."""
        pins, were_idle = self._pins, []
        for page in pages:
            if pins[page]:
                self.num_shared_pins += 1
            else:
                self._unlink(page)
                were_idle.append(page)
            pins[page] += 1
            self._came_again[page] = 1
        return were_idle

    def add(self, key: bytes, page: int) -> int:
        """`page`, used by one request that has the pages before it in the chain pinned, holds what `key` names. The
        page of this key from now on: another one where somebody was faster, and then nothing was done."""
        known = self._pages.setdefault(key, page)
        if known != page:
            return known
        if self._keys[page] is not None or self._pins[page]:
            raise Internal(f"page {page} is in the prefix index already")
        self._keys[page] = key
        self._pins[page] = 1
        self._came_again[page] = self._evicted.pop(key, page) is None
        return page

    def share(self, page: int) -> None:
        """`page`, used by one request that has the pages before it in the chain pinned, can be pinned by others. It is
        not found by a key, and belongs to nobody once they let go of it."""
        if self._keys[page] is not None or self._pins[page]:
            raise Internal(f"page {page} is in the prefix index already")
        self._pins[page] = 1

    def holds(self, page: int) -> bool:
        """Whether it can be found; a pinned page may have been dropped."""
        return self._keys[page] is not None

    def unpin(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """A request lets go of these, which are all that it pinned, in the order of its chain. Those that are idle
        then; and those that can be found no more, and belong to nobody now."""
        pins, idle, dropped = self._pins, [], []
        for page in reversed(pages):
            if not pins[page]:
                raise Internal(f"page {page} is released by a room that does not use it")
            pins[page] -= 1
            if pins[page]:
                self.num_shared_pins -= 1
            elif self._keys[page] is None:
                dropped.append(page)
            else:
                self._link(page, bool(self._came_again[page]))
                idle.append(page)
        return idle, dropped

    def evict(self, count: int) -> list[int]:
        """Forget `count` idle pages (or all)."""
        evicted = []
        for _ in range(min(count, self.num_idle)):
            page = self._next[self._head]
            if page == self._head:
                page = self._next[self._protected_head]
            key = self._keys[page]
            if key is not None:
                self._evicted[key] = None
            self._unlink(page)
            self._forget(page)
            evicted.append(page)
        while len(self._evicted) > len(self._keys):
            self._evicted.popitem(last=False)
        return evicted

    def flush(self) -> list[int]:
        """Nothing can be found any more. The pages that were idle: nobody's now. What is pinned stays so."""
        for page in list(self._pages.values()):
            self._forget(page)
        self._evicted.clear()
        return self.evict(self.num_idle)

    def check_unused(self, num_pages: int) -> None:
        """Raise Internal unless nothing is pinned, and exactly this many pages can be found and are idle."""
        num_pinned, num_idle = sum(pins > 0 for pins in self._pins), len(self._idle())
        if num_pinned or self.num_shared_pins or not len(self) == num_idle == self.num_idle == num_pages:
            raise Internal(
                f"the prefix index has {len(self)} pages, {num_pinned} of them pinned and {num_idle} idle "
                f"({self.num_idle} counted); {num_pages} are cached"
            )

    def _idle(self) -> list[int]:
        """In the order in which they go."""
        pages = []
        for head in (self._head, self._protected_head):
            page = self._next[head]
            while page != head:
                pages.append(page)
                page = self._next[page]
        return pages

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._pages[key]
            self._keys[page] = None
            self._generations[page] += 1

    def _link(self, page: int, is_protected: bool) -> None:
        """As the newest."""
        head = self._protected_head if is_protected else self._head
        newest = self._prev[head]
        self._next[newest], self._prev[page] = page, newest
        self._next[page], self._prev[head] = head, page
        self._is_protected[page] = is_protected
        self._num_protected += is_protected
        self.num_idle += 1
        if self._num_protected > len(self._keys) // PROTECTED:
            oldest = self._next[self._protected_head]
            self._unlink(oldest)
            self._came_again[oldest] = 0
            self._link(oldest, False)

    def _unlink(self, page: int) -> None:
        before, behind = self._prev[page], self._next[page]
        self._next[before], self._prev[behind] = behind, before
        self._num_protected -= self._is_protected[page]
        self.num_idle -= 1
