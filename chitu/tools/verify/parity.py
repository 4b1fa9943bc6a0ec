"""Judgement whether answers are those of a unified engine, and if not, which instance is at fault; and of pages of KV,
by the checksums that an answer returns (`return_page_sums`). Pure.

**Damage.** Checksums of the pages that P wrote, from P's memory and from D's once they had landed, must be equal,
whatever the dtype and the answer; so must those of the same full pages when the request was over. Anything else is
damage on the way, or in D's memory.

**Unlike.** Checksums of two requests with the same tokens are equal only if the same arithmetic in the same order made
the bytes, so a difference alone proves no fault. They are used only if an answer is wrong already, and a page counts
only if all right answers agree on it.

**The rule.** The engine scores each answer: the logprob of each of its tokens after the prompt and the tokens before
it, and its own likeliest token there. Rounding differs between engines, batches and devices, so logprobs may differ by
a `limit`, and so may the gap between two tokens. The limit follows what is measured on something sound (`limit_of`):
the engine's own answers, which it computed token by token, scored by itself as a prompt.

* A greedy token is right if it is the reference's likeliest, a *near-tie* if that one is likelier by at most the
  limit, and wrong beyond. Later tokens are judged after the token that was taken, so a near-tie excuses nothing else.
* Each logprob in the answer differs from the reference's by at most the limit, else it is wrong.
* A seeded answer has the tokens that the unified engine draws with the same seed. If one differs, the first difference
  is a near-tie only if the logprobs of this answer differ by more than `DRAW_NOISE`: if they agree better, at most one
  draw in a thousand falls another way.

**The engine** is not taken on trust: if its own answers differ from what a reference (itself, or `transformers`) makes
of them by more than the dtype explains, everything is wrong (`is_unsound`). That is judged in the mean, since in 16 or
8 bits single tokens are far off where rounding chooses another expert, or quantised pages another token; in float32
neither happens.

**Pairs.** Single differences may be large where rounding is coarse, but their mean is not. So a pair is wrong, too, if
its logprobs differ in the mean by several times what those of another pair do, for the same tokens (`unlike_pairs`).

A fault of computing that changes no token, no logprob by more than the limit, and all pairs alike is not detected.
Damaged pages are, whatever they change, by their checksums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from chitu.protocol import LOGPROB_CAPS, UNLIKE_OVER_NOISE, KVLayout, logprob_limit
from chitu.tools.verify.probe import CheckedRequest, MovedSums, Pair, Score, Served

SUM_DIGITS = 16
UNKNOWN_LAYER = -1

Cause = Literal["transfer", "memory", "unlike"]
DRAW_NOISE = 1e-3
"""Difference of logprobs (nats) up to which a draw must be equal."""
OUTCOMES: tuple[Outcome, ...] = ("same", "near-tie", "wrong")
"""Outcomes from the best to the worst."""


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
    left = [pages[moved.first_page : num_full] for pages in by_layer(served.page_sums, layout.num_summed_layers)]
    sent = [pages[: len(left[0])] for pages in by_layer(moved.sent, layout.num_layers)[: len(left)]]
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


Outcome = Literal["same", "near-tie", "wrong"]


class Judgement(msgspec.Struct, frozen=True):
    """Judgement of one answer."""

    outcome: Outcome
    place: int = -1
    """Position of the first wrong token, from 0; else of the first near-tie; -1: none."""
    says: str = ""
    difference: float = 0.0
    """Largest difference of a logprob from the reference's (nats), up to `place` if it is wrong."""


def compare(
    asked: CheckedRequest,
    scores: Sequence[Score],
    drawn: Sequence[int] | None,
    limit: float,
    difference: float = 0.0,
) -> Judgement:
    """Judge one answer. `drawn` is the unified engine's answer with the same seed; None if the answer is greedy.
    `limit`: most nats that rounding may move a logprob."""
    tie: tuple[int, str] | None = None
    for place, (token, score) in enumerate(zip(asked.tokens, scores, strict=True)):
        if place < len(asked.logprobs):
            apart = abs(asked.logprobs[place] - score.logprob)
            difference = max(difference, apart)
            if not apart <= limit:
                says = f"token {place} has logprob {asked.logprobs[place]:.4f}, not {score.logprob:.4f}"
                return Judgement("wrong", place, says, difference)
        gap = score.top_logprob - score.logprob
        if drawn is None and token != score.top and gap > 0:
            says = f"token {place} is {token}, where {score.top} is likelier by {gap:.4f}"
            if gap > limit:
                return Judgement("wrong", place, says, difference)
            tie = tie or (place, says)
    if drawn is not None and tuple(drawn) != asked.tokens:
        pairs = enumerate(zip(asked.tokens, drawn, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), min(len(drawn), len(asked.tokens)))
        says = f"token {place} is not the draw of one engine with the same seed"
        if difference <= DRAW_NOISE:
            return Judgement("wrong", place, says, difference)
        tie = (place, says)
    return Judgement("near-tie", *tie, difference) if tie is not None else Judgement("same", difference=difference)


def limit_of(noise: float, *dtypes: str) -> float:
    """Return the limit for answers that one engine scores whose own answers are off by up to `noise`: `logprob_limit`,
    or twice that noise, if more is needed to pass itself."""
    return max(logprob_limit(noise, *dtypes), 2 * noise)


def is_unsound(noise: float, mean: float, dtype: str) -> bool:
    """Return whether an engine's answers differ from their scores by more than rounding does: `noise` at most, `mean`
    in the mean (nats)."""
    cap = LOGPROB_CAPS[dtype]
    return not mean <= cap / 2 or (dtype == "float32" and not noise <= cap)


def differences(asked: CheckedRequest, scores: Sequence[Score]) -> list[float]:
    """Return how far each logprob of an answer is from its score (nats)."""
    return [abs(own - score.logprob) for own, score in zip(asked.logprobs, scores, strict=True)]


class Mean(msgspec.Struct, frozen=True):
    """Mean difference of one answer's logprobs from their scores."""

    pair: Pair
    tokens: Hashable
    """What was computed: prompt and answer."""
    mean: float


def unlike_pairs(means: Iterable[Mean], noise: float) -> dict[Pair, tuple[float, float]]:
    """Return the pairs that differ from the reference far more than another pair does for the same tokens: the mean
    difference of each, and that of the other ones. `noise`: that of sound answers; no smaller one counts."""
    groups: dict[Hashable, dict[Pair, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in means:
        groups[one.tokens][one.pair].append(one.mean)
    own: dict[Pair, list[float]] = defaultdict(list)
    best: dict[Pair, list[float]] = defaultdict(list)
    for by_pair in groups.values():
        each = {pair: fmean(found) for pair, found in by_pair.items()}
        for pair in each if len(each) > 1 else ():
            own[pair].append(each[pair])
            best[pair].append(min(mean for other, mean in each.items() if other != pair))
    found = {pair: (fmean(own[pair]), max(noise, fmean(best[pair]))) for pair in own}
    return {pair: (mean, least) for pair, (mean, least) in found.items() if not mean <= UNLIKE_OVER_NOISE * least}


def pair_name(pair: Pair) -> str:
    return pair[1] if pair[0] is None else f"{pair[0]}-{pair[1]}"


def blame(wrong: Mapping[Pair, Collection[int]], judged: Collection[Pair]) -> list[str]:
    """Return names of instances and pairs that explain all wrong answers. `wrong` has by pair the positions of the
    first wrong tokens; `judged` has all pairs that answered.

    An instance is named if all of its pairs are wrong and it has several. Otherwise a wrong first token names P: it is
    sampled from P's logits and does not depend on the transferred KV. If neither decides, the pair is named.
    """
    by_instance: dict[str, set[Pair]] = defaultdict(set)
    for pair in judged:
        for name in pair:
            if name is not None:
                by_instance[name].add(pair)
    if len(judged) > 1 and set(wrong) == set(judged):
        prefills, decodes = {pair[0] for pair in judged}, {pair[1] for pair in judged}
        if (len(prefills) > 1 and len(decodes) > 1) or prefills == {None}:
            return ["all"]
        return [str(next(iter(prefills)))] if len(prefills) == 1 else [next(iter(decodes))]
    guilty = sorted(name for name, pairs in by_instance.items() if len(pairs) > 1 and pairs <= set(wrong))
    for pair, places in sorted(wrong.items(), key=str):
        if not set(pair) & set(guilty):
            guilty.append(pair[0] if pair[0] is not None and set(places) == {0} else pair_name(pair))
    return list(dict.fromkeys(guilty))


def unlike_texts(asked: Sequence[CheckedRequest]) -> list[str]:
    """Return a reason for each two answers with the same tokens and different text, streamed or not."""
    texts: dict[tuple[int, ...], CheckedRequest] = {}
    reasons = []
    for one in asked:
        first = texts.setdefault(one.tokens, one)
        if first.text != one.text:
            names = f"{first.request_id} and {one.request_id}"
            reasons.append(f"requests {names} have the same tokens but different text: {first.text!r}, {one.text!r}")
    return reasons
