"""`PageLoad`: pages of one prompt on their way from the tiers into the pool, page after page in the order of its chain.

Made by the step thread, filled by the thread `tiers`. Invariant: after `stop` has returned nothing of it is written to
the pool any more, so the pages may go to others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class PageLoad:
    """`pages[i]` of the pool is to hold the page of `keys[i]`. `end_s`: when it is waited for no longer."""

    def __init__(self, keys: Sequence[bytes], pages: Sequence[int], end_s: float) -> None:
        self.keys = keys
        self.pages = pages
        self.end_s = end_s
        self._lock = threading.Lock()
        self._is_stopped = False
        self._num_restored = 0
        self.is_done = False
        """Nothing more will come. Any thread may read it."""
        self._tried: dict[str, int] = {}
        """At which page a tier was asked last, by its name."""
        self._source = ("", 0, 0)

    @classmethod
    def none(cls) -> PageLoad:
        """Nothing comes."""
        load = cls((), (), 0.0)
        load.is_done = True
        return load

    @property
    def position(self) -> int:
        """Of the first page that is not restored."""
        return self._num_restored

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def tries(self, tier: str) -> bool:
        """Whether to ask this tier for the next page: once for each."""
        if self._tried.get(tier) == self._num_restored:
            return False
        self._tried[tier] = self._num_restored
        return True

    def note_source(self, tier: str, begin: int, end: int) -> None:
        """These pages were brought to host memory by a tier."""
        self._source = (tier, begin, end)

    def num_from_source(self, begin: int, end: int) -> tuple[str, int]:
        """How many of these pages a tier brought, and which."""
        tier, source_begin, source_end = self._source
        return tier, max(0, min(end, source_end) - max(begin, source_begin))

    def restore(self, copy: Callable[[int], None]) -> bool:
        """`copy` the next page into its place in the pool, which it is given. False, and nothing done, after `stop`."""
        with self._lock:
            if self._is_stopped:
                return False
            copy(self.pages[self._num_restored])
            self._num_restored += 1
            return True

    def stop(self) -> int:
        """How many pages are restored, for good. Waits for the copy of one page at most; idempotent."""
        with self._lock:
            self._is_stopped = True
            return self._num_restored
