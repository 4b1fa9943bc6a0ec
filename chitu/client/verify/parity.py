"""Judgement whether answers are those of a unified engine, and if not, which instance is at fault. Pure.

**The rule.** The engine scores each answer: the logprob of each of its tokens after the prompt and the tokens before
it, and its own likeliest token there. Rounding differs between engines, batches and devices, so logprobs may differ by
a `limit`, and so may the gap between two tokens. The limit follows what is measured on something sound
(`limit_of`): the engine's own answers, which it computed token by token, scored by itself as a prompt.

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
Damaged pages are, whatever they change, by their checksums (`pages.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal

import msgspec

from chitu.client.verify.probe import CheckedRequest, Pair, Score
from chitu.protocol import LOGPROB_CAPS, UNLIKE_OVER_NOISE, logprob_limit

DRAW_NOISE = 1e-3
"""Difference of logprobs (nats) up to which a draw must be equal."""

Outcome = Literal["same", "near-tie", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("same", "near-tie", "wrong")
"""Outcomes from the best to the worst."""


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
