"""Decode admission, growth and retraction: how running requests share the pages without ever locking each other out.

Pure policy: values in, values out. Used by D and by unified instances.

Why it cannot deadlock: a request that could not fit the pool alone is refused on arrival. Every running request can be
retracted to host memory, the youngest first, so the oldest always gets pages. Pages in transfer come to an end within a
deadline and then belong to a running (retractable) request. Retracted requests come back before anything new starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chitu.instance.scheduling.sequence import Sequence


class GrowthReserve:
    """Pages to keep back for requests that are admitted already. To add one costs the same however many there are.

    Each gets what it still may need, at most `reserved_decode_tokens`; and whatever happens, the neediest one can run
    to its end: the rest can be retracted to host memory.
    """

    def __init__(self, page_size: int, reserved_decode_tokens: int, num_shared: int = 0) -> None:
        """`num_shared`: pages that are held by one more of them than they count for."""
        self._page_size = page_size
        self._reserved_decode_tokens = reserved_decode_tokens
        self._soon = 0
        self._held = -num_shared
        """By all of them."""
        self._longest = 0
        """Pages that the neediest has in the end."""
        self.is_empty = True

    def add(self, sequence: Sequence, held: int, num_shared: int = 0) -> None:
        """It is admitted, and holds `num_pages` pages, of which others hold `num_shared`."""
        in_the_end = -(-sequence.final_len // self._page_size)
        soon_tokens = min(sequence.final_len, sequence.kv_len + self._reserved_decode_tokens)
        self._soon += max(0, -(-soon_tokens // self._page_size) - held)
        self._held += held - num_shared
        self._longest = max(self._longest, in_the_end, held)
        self.is_empty = False

    @property
    def pages(self) -> int:
        # What retracting all others returns to the neediest, with its own, is what all of them hold.
        return max(self._soon, self._longest - self._held)


def may_admit(free_pages: int, wanted_pages: int, reserve: int, nothing_active: bool) -> bool:
    """Whether a new or a retracted request gets its pages now. With nothing active there is nobody to keep room for."""
    return wanted_pages <= free_pages if nothing_active else wanted_pages + reserve <= free_pages


def victims_for_growth(
    running: Iterable[Sequence], needy: set[Sequence], free_pages: int, coming_back: Callable[[bytes], int]
) -> list[Sequence]:
    """The sequences to retract, youngest first, so that all others can take their next step. `coming_back`: pages that
    a room gives back, behind those that were asked for before.

    A needy request that is retracted itself no longer needs its page.
    """
    by_age = sorted(running, key=lambda s: s.order)
    victims: list[Sequence] = []
    demand = len(needy)
    while by_age and demand > free_pages:
        victim = by_age.pop()
        victims.append(victim)
        free_pages += coming_back(victim.room)
        demand -= victim in needy
    return victims
