"""The state of every page: free, used, quarantined or cached. Step thread only; independent of requests and tensors.

Invariant: free + used + quarantined + cached == total, and a page is never given out twice. Runs of adjacent pages are
preferred, because they travel in one copy and gather as one view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chitu.errors import Capacity, Internal

_FREE, _USED, _QUARANTINED, _CACHED = 0, 1, 2, 3


class PageAllocator:
    """The states of pages `0 .. num_pages - 1`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._state = np.zeros(num_pages, dtype=np.uint8)
        self._counts = [num_pages, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[_FREE]

    @property
    def num_used(self) -> int:
        return self._counts[_USED]

    @property
    def num_quarantined(self) -> int:
        return self._counts[_QUARANTINED]

    @property
    def num_cached(self) -> int:
        return self._counts[_CACHED]

    def reserve(self, count: int, after: int = -1) -> list[int]:
        """Take `count` free pages, right after page `after` if possible. Raise Capacity if fewer are free."""
        if count > self.num_free:
            raise Capacity(f"{count} pages wanted, {self.num_free} of {self.num_pages} are free")
        if count == 0:
            return []
        pages = self._extension(count, after) or self._best_run(count)
        self._state[pages] = _USED
        self._counts[_FREE] -= count
        self._counts[_USED] += count
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Free used, quarantined or cached pages. Raise Internal if one is free already."""
        index = np.asarray(pages, dtype=np.int64)
        states = self._state[index]
        if (states == _FREE).any() or len(np.unique(index)) != len(index):
            raise Internal(f"pages released twice: {sorted(pages)}")
        for state, count in enumerate(np.bincount(states, minlength=len(self._counts)).tolist()):
            self._counts[state] -= count
        self._state[index] = _FREE
        self._counts[_FREE] += len(index)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Quarantine used pages, so that no room gets them: a peer may still write to them (or read them)."""
        self._turn(pages, _USED, _QUARANTINED, "quarantined that are not in use")

    def cache(self, pages: Sequence[int]) -> None:
        """Mark used pages as cached: no room uses them any longer, but their content is kept."""
        self._turn(pages, _USED, _CACHED, "cached that are not in use")

    def use_cached(self, pages: Sequence[int]) -> None:
        """Mark cached pages as used again, with their content."""
        self._turn(pages, _CACHED, _USED, "used for what they hold that are not cached")

    def _turn(self, pages: Sequence[int], before: int, after: int, mistake: str) -> None:
        index = np.asarray(pages, dtype=np.int64)
        if (self._state[index] != before).any():
            raise Internal(f"pages {mistake}: {sorted(pages)}")
        self._state[index] = after
        self._counts[before] -= len(index)
        self._counts[after] += len(index)

    def _extension(self, count: int, after: int) -> list[int]:
        """Return the pages right after `after` if all of them are free, else []."""
        if after < 0 or after + count >= self.num_pages or self._state[after + 1 : after + 1 + count].any():
            return []
        return list(range(after + 1, after + 1 + count))

    def _best_run(self, count: int) -> list[int]:
        """Return the start of the shortest free run that suffices, else the longest runs until there are enough."""
        if count == 1:  # every growing request comes here once per page, so skip the search for the best run
            return [int(self._state.argmin())]
        free = np.flatnonzero(self._state == _FREE)
        breaks = np.flatnonzero(np.diff(free) != 1) + 1
        starts = np.concatenate(([0], breaks))
        lengths = np.diff(np.concatenate((starts, [len(free)])))
        fitting = np.flatnonzero(lengths >= count)
        if len(fitting):
            start = int(starts[fitting[np.argmin(lengths[fitting])]])
            return [int(page) for page in free[start : start + count]]
        pages: list[int] = []
        for run in np.argsort(-lengths, kind="stable"):
            start, length = int(starts[run]), int(lengths[run])
            pages.extend(int(page) for page in free[start : start + min(length, count - len(pages))])
            if len(pages) == count:
                break
        return pages
