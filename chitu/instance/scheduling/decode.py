"""Decode admission, growth and retraction: how running requests share the pages without deadlock.

Pure policy: values in, values out. Used by D and by unified instances.

Why it cannot deadlock: a request that could not fit the pool alone is refused on arrival. Every running request can be
retracted to host memory, the last in `Sequence.order` first, so the first always gets pages. A transfer ends within a
deadline, and its pages then belong to a running (retractable) request. Retracted requests resume before anything new
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chitu.instance.scheduling.sequence import Sequence


class GrowthReserve:
    """Pages to keep back for requests that are admitted already. Adding one takes constant time.

    Each gets what it may still need, at most `reserved_decode_tokens`. In any case the neediest one can run to its end:
    the rest can be retracted to host memory.
    """

    def __init__(self, page_size: int, reserved_decode_tokens: int, num_shared: int = 0) -> None:
        """Start empty. `num_shared`: how often a page is held by a further request, which must not count it again."""
        self._page_size = page_size
        self._reserved_decode_tokens = reserved_decode_tokens
        self._soon = 0
        self._held = -num_shared
        """Pages held by all of the requests."""
        self._longest = 0
        """Pages that the neediest request holds at its end."""
        self.is_empty = True

    def add(self, sequence: Sequence, held: int, num_shared: int = 0) -> None:
        """Add an admitted sequence that holds `held` pages, `num_shared` of which other requests hold, too."""
        in_the_end = -(-sequence.final_len // self._page_size)
        soon_tokens = min(sequence.final_len, sequence.kv_len + self._reserved_decode_tokens)
        self._soon += max(0, -(-soon_tokens // self._page_size) - held)
        self._held += held - num_shared
        self._longest = max(self._longest, in_the_end, held)
        self.is_empty = False

    @property
    def pages(self) -> int:
        # If all others are retracted, the neediest can use the pages that all of them hold.
        return max(self._soon, self._longest - self._held)


def may_admit(free_pages: int, wanted_pages: int, reserve: int, nothing_active: bool) -> bool:
    """Return whether a new or a retracted request gets its pages now. If no request is active, none needs a reserve."""
    return wanted_pages <= free_pages if nothing_active else wanted_pages + reserve <= free_pages


def victims_for_growth(
    running: Iterable[Sequence], needy: set[Sequence], free_pages: int, coming_back: Callable[[bytes], int]
) -> list[Sequence]:
    """Return the sequences to retract, the last in order first, so that all others can take their next step.
    `coming_back` counts the pages that a room frees, in addition to the rooms passed to it before.

    A needy request that is retracted itself no longer needs its page.
    """
    by_order = sorted(running, key=lambda s: s.order)
    victims: list[Sequence] = []
    demand = len(needy)
    while by_order and demand > free_pages:
        victim = by_order.pop()
        victims.append(victim)
        free_pages += coming_back(victim.room)
        demand -= victim in needy
    return victims
