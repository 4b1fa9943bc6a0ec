"""Wrong pages of KV, by the checksums that an answer returns (`return_page_sums`). Pure.

**Damage.** Checksums of the pages that P wrote, from P's memory and from D's once they had landed, must be equal,
whatever the dtype and the answer; so must those of the same full pages when the request was over. Anything else is
damage on the way, or in D's memory.

**Unlike.** Checksums of two requests with the same tokens are equal only if the same arithmetic in the same order made
the bytes, so a difference alone proves no fault. They are used only if an answer is wrong already, and a page counts
only if all right answers agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from chitu.client.verify.probe import MovedSums, Served
from chitu.protocol import KVLayout

SUM_DIGITS = 16
UNKNOWN_LAYER = -1

Cause = Literal["transfer", "memory", "unlike"]


class Place(msgspec.Struct, frozen=True):
    """First difference, ordered by page, then layer: a page does not depend on later pages."""

    layer: int
    """UNKNOWN_LAYER if the checksums cover all layers (of a very long prompt)."""
    page: int
    """Page number, counted over the prompt and then the answer."""
    is_alone: bool
    """Whether no other layer of that page differs. A computation error would also change all later layers."""
    cause: Cause = "unlike"
    """`transfer`: D's memory had other bytes than P's when all had landed. `memory`: it had the same, and others when
    the request was over. `unlike`: the bytes are not those of right answers with the same tokens."""
    num_pages: int = 1
    """Number of pages that differ, with `transfer` and `memory`."""

    @property
    def says(self) -> str:
        where = f"page {self.page}"
        if self.layer != UNKNOWN_LAYER:
            others = "in that layer alone" if self.is_alone else "and in others of that page"
            where += f", layer {self.layer}, {others}"
        if self.cause == "unlike":
            return f"K and V first differ in {where}"
        count = f"{self.num_pages} pages of K and V" if self.num_pages > 1 else "K and V"
        when = "when they had landed" if self.cause == "transfer" else "at the end, although they had landed correctly"
        return f"{count} differ between P and D, {when}: first in {where}"


def by_layer(sums: str, num_layers: int) -> list[list[str]]:
    """Return `[layers][pages]`, with no pages if the text does not divide into so many layers."""
    pages, rest = divmod(len(sums), SUM_DIGITS * num_layers)
    if rest:
        return [[] for _ in range(num_layers)]
    starts = range(0, len(sums), SUM_DIGITS)
    each = [sums[start : start + SUM_DIGITS] for start in starts]
    return [each[layer * pages : (layer + 1) * pages] for layer in range(num_layers)]


def num_compared(served: Served) -> int:
    """Return the number of checksums that both sides gave for a request."""
    return len(served.moved.sent) // SUM_DIGITS if served.moved is not None else 0


def damage_on_its_way(moved: MovedSums) -> Place | None:
    """Return the first page that did not land as P wrote it, or None."""
    return _first(by_layer(moved.sent, moved.layers), by_layer(moved.landed, moved.layers), moved, "transfer")


def damage_of(served: Served, layout: KVLayout) -> Place | None:
    """Return the first page of a request that differs from P's, when it landed or at the end, or None. `layout` is
    D's."""
    moved = served.moved
    if moved is None:
        return None
    damage = damage_on_its_way(moved)
    if damage is not None or moved.layers != layout.num_layers or layout.tp_size > 1:  # those of the end cover one rank
        return damage
    num_full = (served.prompt_tokens + served.continued_tokens) // layout.page_size
    left = [pages[moved.first_page : num_full] for pages in by_layer(served.page_sums, layout.num_layers)]
    sent = [pages[: len(left[0])] for pages in by_layer(moved.sent, layout.num_layers)]
    return _first(sent, left, moved, "memory")


def _first(
    one: Sequence[Sequence[str]], other: Sequence[Sequence[str]], moved: MovedSums, cause: Cause
) -> Place | None:
    """Return the first difference of two `[layers][pages]`; None if there is none."""
    pages = max(map(len, (*one, *other)), default=0)
    unlike = {
        page: layers
        for page in range(pages)
        if (layers := [n for n in range(len(one)) if one[n][page : page + 1] != other[n][page : page + 1]])
    }
    if not unlike:
        return None
    page, layers = next(iter(unlike.items()))
    if moved.layers == 1:
        return Place(UNKNOWN_LAYER, moved.first_page + page, False, cause, len(unlike))
    return Place(layers[0], moved.first_page + page, len(layers) == 1, cause, len(unlike))


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
