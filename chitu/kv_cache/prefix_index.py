"""Content keys of full pages: the key of a page is a hash of all tokens up to its end.

Keys form a chain: the key of page n is `blake2b(key of page n - 1 + token ids of page n)`, 128 bits. The key before
page 0 is the *root*, a hash of the `cache_salt` and of everything else that K and V depend on, such as the request's
LoRA adapter. The page in which rows of an image begin has the image's key and their position, too, and the chain takes
these to all later pages: another image at the same place has no page in common from there on. So equal keys mean equal
K and V on every instance, and prompts with different salts or adapters have no key in common. Pure; step thread.

Two different chains with one key would give wrong tokens. By chance that takes 2**64 pages. An attacker needs as many
hashes for a collision of two prompts of their choice, and 2**128 to match the key of another client's prompt.

The cached pages that later prompts may begin with, by content key.

Owned by `PagedKVCacheManager`, step thread only. Pure: keys and page numbers in, page numbers out; no tokens, no clock.
A page is *pinned* by the requests that use it, and *idle* while none does. Everything costs O(pages touched).

Most pages are never used again, so idle pages are evicted by a form of 2Q (T. Johnson and D. Shasha, 1994). Pages that
were requested again, while indexed or within as many evictions as there are pages, are *protected*. At most a third of
all pages are. Beyond that the oldest protected page becomes the newest unprotected one. Unprotected pages are evicted
first, by their last use.

A request that pins a page pins all pages before it in its chain, and unpins them last page first. If a page is
requested again, so are all before it. So no page is evicted before its successors: eviction never cuts a chain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec

from chitu.errors import Internal
from chitu.protocol import KVLayout, encode

KEY_BYTES = 16
TOKEN_BYTES = 4
PROTECTED = 3
"""At most one in this many pages is protected."""


def layout_fingerprint(layout: KVLayout) -> bytes:
    """Return the fingerprint of model, weights, KV layout, dtype and page size. `tp_size` does not enter it: all ranks
    together hold the same. Nor do the adapters: each enters the keys of its own pages."""
    return blake2b(encode(msgspec.structs.replace(layout, tp_size=1, adapters=())), digest_size=KEY_BYTES).digest()


def lasting_fingerprint(fingerprint: bytes, weights_digest: bytes, version: str, settings: Sequence[object]) -> bytes:
    """Return a fingerprint for pages that outlive a process or that other processes read. The layout covers the shapes
    of the weights only, and another version or other `settings` of the model may compute different values."""
    text = repr((version, *settings)).encode()
    return blake2b(fingerprint + weights_digest + text, digest_size=KEY_BYTES).digest()


def marks_by_block(images: Sequence[tuple[int, bytes]], size: int) -> dict[int, bytes]:
    """Return what rows of images add to the blocks of `size` tokens in which they begin. `images`: `page_marks`."""
    marks: dict[int, bytes] = {}
    for start, mark in images:
        marks[start // size] = marks.get(start // size, b"") + start.to_bytes(TOKEN_BYTES, "little") + mark
    return marks


@dataclass(slots=True)
class PageKeys:
    """The keys of one sequence's pages, each computed once."""

    root: bytes
    page_size: int
    """Tokens per page."""
    epoch: int = 0
    """That of the cache which they were made for (`PagedKVCacheManager.accepts`)."""
    marks: Mapping[int, bytes] = field(default_factory=dict)
    """By page: what rows of images that begin in it add to its key."""
    adapter: str = ""
    """Name of the LoRA adapter, for readers of KV events; keys are made with its hash."""
    is_salted: bool = False
    """Whether `root` is the hash of a `cache_salt`, too."""
    _keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        fingerprint: bytes,
        page_size: int,
        cache_salt: str = "",
        adapter_hash: str = "",
        epoch: int = 0,
        images: Sequence[tuple[int, bytes]] = (),
        adapter: str = "",
    ) -> PageKeys:
        """Return no keys yet. `adapter_hash`: 32 hex digits; empty without an adapter, as is its name `adapter`.
        `images`: `page_marks` of the sequence's images."""
        person = bytes.fromhex(adapter_hash)
        root = blake2b(cache_salt.encode(), digest_size=KEY_BYTES, key=fingerprint, person=person).digest()
        marks = marks_by_block(images, page_size) if images else {}
        return cls(root, page_size, epoch, marks, adapter, bool(cache_salt))

    def copy(self) -> PageKeys:
        """Return a copy for a sequence that begins with the same tokens."""
        return replace(self, _keys=list(self._keys))

    def upto(self, num_pages: int, token_ids: bytes) -> list[bytes]:
        """Return the keys of the first `num_pages`, all of which are full. `token_ids` (int32 LE) are those of the
        sequence; since the last call they may only have grown."""
        self._extend(num_pages, token_ids)
        return self._keys[:num_pages]

    def key_at(self, page: int, token_ids: bytes) -> bytes:
        """Return the key of one full page, in constant time if it is known."""
        self._extend(page + 1, token_ids)
        return self._keys[page]

    def _extend(self, num_pages: int, token_ids: bytes) -> None:
        if self.marks:
            self._extend_with_images(num_pages, token_ids)
            return
        keys, page_bytes = self._keys, self.page_size * TOKEN_BYTES
        key = keys[-1] if keys else self.root
        fresh = blake2b(digest_size=KEY_BYTES).copy  # a copy costs a third less than a new one
        for start in range(len(keys) * page_bytes, num_pages * page_bytes, page_bytes):
            hasher = fresh()
            hasher.update(key + token_ids[start : start + page_bytes])
            key = hasher.digest()
            keys.append(key)

    def _extend_with_images(self, num_pages: int, token_ids: bytes) -> None:
        keys, page_bytes = self._keys, self.page_size * TOKEN_BYTES
        for page in range(len(keys), num_pages):
            content = token_ids[page * page_bytes : (page + 1) * page_bytes] + self.marks.get(page, b"")
            keys.append(blake2b((keys[-1] if keys else self.root) + content, digest_size=KEY_BYTES).digest())


class PrefixIndex:
    """Index of pages `0 .. num_pages - 1`. It takes at most some 370 bytes per page."""

    def __init__(self, num_pages: int) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_pages
        """Key by page; None if the page is not in the index, or was dropped while a request still uses it."""
        self._pins = array("i", bytes(4 * num_pages))
        # The idle pages as two doubly linked rings. The oldest follows the head: `_head`, or `_protected_head`.
        self._head, self._protected_head = num_pages, num_pages + 1
        self._next = array("i", range(num_pages + 2))
        self._prev = array("i", range(num_pages + 2))
        self._came_again = bytearray(num_pages)
        self._is_protected = bytearray(num_pages)
        """Whether an idle page is in the protected ring."""
        self._num_protected = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Keys of evicted pages, the oldest first."""
        self._generations = array("Q", bytes(8 * num_pages))
        self.num_idle = 0
        self.num_shared_pins = 0
        """Pins beyond the first of each page."""

    def __len__(self) -> int:
        """Return the number of pages that can be found."""
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def num_pins(self, page: int) -> int:
        return self._pins[page]

    def generation(self, page: int) -> int:
        """Return the generation of the page's content. It changes as soon as the content can no longer be found, which
        is before the page may be overwritten. Any thread."""
        return self._generations[page]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest prefix of this chain that is in the index."""
        found: list[int] = []
        for page in map(self._pages.get, keys):
            if page is None:
                break
            found.append(page)
        return found

    def pin(self, pages: Sequence[int]) -> list[int]:
        """Pin pages, which came from `find`, for one more request. Return those that were idle."""
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
        """Index `page` under `key` and pin it for the one request that uses it, which has pinned the pages before it in
        the chain. Return the page of this key from now on. If another page has the key already, do nothing and return
        that one."""
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
        """Pin `page` for the one request that uses it, so that more requests can pin it. That request has pinned the
        pages before it in the chain. The page has no key; once the last request unpins it, it is free."""
        if self._keys[page] is not None or self._pins[page]:
            raise Internal(f"page {page} is in the prefix index already")
        self._pins[page] = 1

    def unpin(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Unpin all pages that a request pinned, given in the order of its chain. Return those that are idle now, and
        those that can no longer be found and are free now."""
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

    def evict(self, count: int, keys: list[bytes] | None = None) -> list[int]:
        """Evict `count` idle pages, or all if there are fewer. Return them, and add their keys to `keys`."""
        evicted = []
        for _ in range(min(count, self.num_idle)):
            page = self._next[self._head]
            if page == self._head:
                page = self._next[self._protected_head]
            key = self._keys[page]
            if key is not None:
                self._evicted[key] = None
                if keys is not None:
                    keys.append(key)
            self._unlink(page)
            self._forget(page)
            evicted.append(page)
        while len(self._evicted) > len(self._keys):
            self._evicted.popitem(last=False)
        return evicted

    def flush(self) -> list[int]:
        """Forget all keys. Return the pages that were idle and are free now. Pinned pages stay pinned."""
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
        """Return the idle pages in the order of eviction."""
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
        """Add a page to a ring as the newest."""
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
