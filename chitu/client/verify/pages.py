"""First layer and page in which the KV of a wrong answer differs from that of the right ones. Pure.

It compares the checksums that D (or a unified instance) returns of a request's pages (`return_page_sums`), for requests
with the same tokens. Sums are equal only if the same arithmetic in the same order made the bytes, so a difference alone
proves no fault. They are used only if an answer is wrong already, and a page counts only if all right answers agree on
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SUM_DIGITS = 16


class Place(msgspec.Struct, frozen=True):
    """First difference, ordered by page, then layer: a page does not depend on later pages."""

    layer: int
    page: int
    """Page number, counted over the prompt and then the answer."""
    is_alone: bool
    """Whether no other layer of that page differs. A computation error would also change all later layers."""

    @property
    def says(self) -> str:
        others = "in that layer alone" if self.is_alone else "and in others of that page"
        return f"K and V first differ in page {self.page}, layer {self.layer}, {others}"


def by_layer(sums: str, num_layers: int) -> list[list[str]]:
    """Return `[layers][pages]`, with no pages if the text does not divide into so many layers."""
    pages, rest = divmod(len(sums), SUM_DIGITS * num_layers)
    if rest:
        return [[] for _ in range(num_layers)]
    starts = range(0, len(sums), SUM_DIGITS)
    each = [sums[start : start + SUM_DIGITS] for start in starts]
    return [each[layer * pages : (layer + 1) * pages] for layer in range(num_layers)]


def first_unlike(wrong: str, right: Sequence[str], num_layers: int) -> Place | None:
    """Return the first difference, or None if nothing differs or the right ones differ among themselves."""
    own, others = by_layer(wrong, num_layers), [by_layer(one, num_layers) for one in right]
    num_pages = min((len(one[0]) for one in (own, *others)), default=0) if others else 0
    for page in range(num_pages):
        agreed = [{one[layer][page] for one in others} for layer in range(num_layers)]
        unlike = [n for n in range(num_layers) if len(agreed[n]) == 1 and own[n][page] not in agreed[n]]
        if unlike:
            return Place(unlike[0], page, len(unlike) == 1)
    return None
