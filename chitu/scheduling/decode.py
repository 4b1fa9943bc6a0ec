"""Decode admission, growth and retraction: how running requests share the pages without ever locking each other out.

Pure policy: values in, values out. Used by D and by unified instances.

Why it cannot deadlock: a request that could not fit the pool alone is refused on arrival. Every running request can be
retracted to host memory, the youngest first, so the oldest always gets pages. Pages in transfer come to an end within a
deadline and then belong to a running (retractable) request. Retracted requests come back before anything new starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from chitu.scheduling.sequence import Sequence


def growth_reserve(
    active: Iterable[Sequence], page_size: int, pages_of: dict[bytes, int], reserved_decode_tokens: int
) -> int:
    """Pages to keep back for requests that are admitted already.

    Each gets what it still may need, at most `reserved_decode_tokens`; and whatever happens, the neediest one can run
    to its end (S0, "allocatable tokens"): the rest can be retracted to host memory.
    """
    total = 0
    neediest = 0
    for sequence in active:
        held = pages_of[sequence.room]
        to_the_end = max(0, -(-sequence.final_len // page_size) - held)
        soon_tokens = min(sequence.final_len, sequence.kv_len + reserved_decode_tokens)
        total += max(0, -(-soon_tokens // page_size) - held)
        neediest = max(neediest, to_the_end - _returned_by_retraction(sequence, pages_of))
    return max(total, neediest)


def _returned_by_retraction(sequence: Sequence, pages_of: dict[bytes, int]) -> int:
    """Pages that retracting everybody else of `pages_of` would give back."""
    return sum(pages_of.values()) - pages_of[sequence.room]


def may_admit(free_pages: int, wanted_pages: int, reserve: int, nothing_active: bool) -> bool:
    """Whether a new or a retracted request gets its pages now. With nothing active there is nobody to keep room for."""
    return wanted_pages <= free_pages if nothing_active else wanted_pages + reserve <= free_pages


def needs_page(sequence: Sequence, page_size: int, held_pages: int) -> bool:
    """Whether the next decode step (which writes position `kv_len`) needs a page that the sequence does not hold."""
    return sequence.kv_len >= held_pages * page_size


def victims_for_growth(
    running: Iterable[Sequence], needy: set[Sequence], free_pages: int, pages_of: dict[bytes, int]
) -> list[Sequence]:
    """Who is retracted, youngest first, so that everybody who stays can take its next step.

    A needy request that is retracted itself no longer needs its page.
    """
    by_age = sorted(running, key=lambda s: s.order)
    victims: list[Sequence] = []
    demand = len(needy)
    while by_age and demand > free_pages:
        victim = by_age.pop()
        victims.append(victim)
        free_pages += pages_of[victim.room]
        demand -= victim in needy
    return victims
