"""In which layer and page the KV of a wrong answer first is another than that of the right ones. Pure.

By the checksums that D (or a unified instance) gives of the pages that a request leaves (`return_page_sums`), of
requests with the same tokens. Sums are equal only where the same arithmetic in the same order made the bytes, so they
accuse nobody: they are looked at where an answer was wrong already, and a page counts only if all right answers agree
on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SUM_DIGITS = 16


class Place(msgspec.Struct, frozen=True):
    """Where it begins, pages before layers: a page depends on nothing behind it."""

    layer: int
    page: int
    """Of the prompt and, behind it, of the answer."""
    is_alone: bool
    """No other layer of that page differs: not as where something wrong was computed, unless it is the last layer."""

    @property
    def says(self) -> str:
        others = "in that layer alone" if self.is_alone else "and in others of that page"
        return f"K and V are other ones first in page {self.page}, layer {self.layer}, {others}"


def by_layer(sums: str, num_layers: int) -> list[list[str]]:
    """`[layers][pages]`; no pages where the text is none of so many layers."""
    pages, rest = divmod(len(sums), SUM_DIGITS * num_layers)
    if rest:
        return [[] for _ in range(num_layers)]
    starts = range(0, len(sums), SUM_DIGITS)
    each = [sums[start : start + SUM_DIGITS] for start in starts]
    return [each[layer * pages : (layer + 1) * pages] for layer in range(num_layers)]


def first_unlike(wrong: str, right: Sequence[str], num_layers: int) -> Place | None:
    """None where nothing differs, or where the right ones differ among themselves."""
    own, others = by_layer(wrong, num_layers), [by_layer(one, num_layers) for one in right]
    num_pages = min((len(one[0]) for one in (own, *others)), default=0) if others else 0
    for page in range(num_pages):
        agreed = [{one[layer][page] for one in others} for layer in range(num_layers)]
        unlike = [n for n in range(num_layers) if len(agreed[n]) == 1 and own[n][page] not in agreed[n]]
        if unlike:
            return Place(unlike[0], page, len(unlike) == 1)
    return None
