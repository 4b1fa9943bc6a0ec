"""`PageLoad`: the load of one prompt's pages from the tiers to the pool, one after the other in the order of its chain.

Made by the step thread, filled by the thread `tiers`. Invariant: after `stop` has returned, nothing of it is written to
the pool any longer, so the pages may be given to another request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class PageLoad:
    """A load that puts the page of `keys[i]` into `pages[i]` of the pool. Its deadline is `end_s`."""

    def __init__(self, keys: Sequence[bytes], pages: Sequence[int], end_s: float) -> None:
        self.keys = keys
        self.pages = pages
        self.end_s = end_s
        self._lock = threading.Lock()
        self.is_stopped = False
        self.position = 0
        """Position of the first page that is not restored; only `restore` changes it."""
        self.is_done = False
        """Whether nothing more will arrive. Any thread may read it."""
        self._tried: dict[str, int] = {}
        """Position of the page for which a tier was last asked, by the tier's name."""
        self._source = ("", 0, 0)

    @classmethod
    def none(cls) -> PageLoad:
        """Return a finished load without pages."""
        load = cls((), (), 0.0)
        load.is_done = True
        return load

    def tries(self, tier: str) -> bool:
        """Return whether to ask this tier for the next page; True once per page."""
        if self._tried.get(tier) == self.position:
            return False
        self._tried[tier] = self.position
        return True

    def note_source(self, tier: str, begin: int, end: int) -> None:
        """Note that a tier brought these pages to host memory."""
        self._source = (tier, begin, end)

    def num_from_source(self, begin: int, end: int) -> tuple[str, int]:
        """Return the tier that brought the last pages to host memory, and how many of these pages were among them."""
        tier, source_begin, source_end = self._source
        return tier, max(0, min(end, source_end) - max(begin, source_begin))

    def restore(self, copy: Callable[[int], None]) -> bool:
        """Call `copy` with the place of the next page in the pool. After `stop`, do nothing and return False."""
        with self._lock:
            if self.is_stopped:
                return False
            copy(self.pages[self.position])
            self.position += 1
            return True

    def stop(self) -> int:
        """Stop the load and return the final number of restored pages. Wait for one page copy at most; idempotent."""
        with self._lock:
            self.is_stopped = True
            return self.position
