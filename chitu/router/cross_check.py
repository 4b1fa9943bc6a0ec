"""Check whether a second P computes the same logits for a prompt as the first, and if not, which is wrong. Pure.

`cross_check` is a generator: it yields computations to be made and is sent their results. `cross_checks.py` runs it.

1. A second P computes the whole prompt of an answer that was given, without its cache. The rows of logits after the
   prompt must agree. Every weight, and every page of the prompt's KV, contributes to that row.
2. If they do not agree, D judges. It computes the row of the next position from the pages of each P, and that P
   computes the row, too. A P whose weights or kernels are wrong disagrees with what D made of its pages; the other one
   does not.
3. If neither disagrees with D, and the first P now computes what the second did, then its answer was wrong and its
   weights are not: pages of its cache are damaged, or the fault was transient.

A fault that moves no logprob of the likeliest tokens by more than the tolerance is not detected.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, get_args

from chitu.protocol import pack_i32, unpack_logprobs
from chitu.router.routing import InstanceKey

Outcome = Literal["agreed", "wrong", "passing", "unclear", "unanswered"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Recompute:
    """A prompt to be computed without the cache, with the logprobs of its tokens."""

    token_ids: bytes
    """Prompt, int32 LE."""
    max_tokens: int
    prefill: InstanceKey
    by_another: bool = False
    """Whether any P except `prefill` is to compute it."""


@dataclass(frozen=True, slots=True)
class Computed:
    prefill: InstanceKey
    tokens: list[int]
    rows: list[bytes]
    """Packed logprobs of each token (`protocol/logprobs.py`)."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. `agreed`; `wrong`: `guilty` computes wrongly; `passing`: `guilty` gave one wrong answer;
    `unclear`: two P disagree, and D cannot tell which is right; `unanswered`: there was no second P, or it failed."""

    outcome: Outcome
    guilty: InstanceKey | None = None
    says: str = ""


UNANSWERED = CheckResult("unanswered")


def cross_check(
    token_ids: bytes, first: Computed, tolerance: float
) -> Generator[Recompute, Computed | None, CheckResult]:
    """Compare `first`, which was served, with a second P. Each computation is answered by its result, or by None if it
    has none."""
    second = yield Recompute(token_ids, 1, first.prefill, by_another=True)
    if second is None or second.prefill == first.prefill:
        return UNANSWERED
    apart = rows_apart(first.rows[0], second.rows[0])
    if apart <= tolerance:
        return CheckResult("agreed")
    one, other = first.prefill.name, second.prefill.name
    says = f"{one} and {other} differ by {apart:.3g} in the logprobs behind one prompt of {len(token_ids) // 4} tokens"
    wrong: list[InstanceKey] = []
    again: list[bytes] = []
    for prefill in (first.prefill, second.prefill):
        judged = yield Recompute(token_ids, 2, prefill)
        own = None
        if judged is not None and judged.prefill == prefill and len(judged.rows) == 2:
            own = yield Recompute(token_ids + pack_i32(judged.tokens[:1]), 1, prefill)
        if judged is None or own is None or own.prefill != prefill:
            return CheckResult("unclear", says=f"{says}; {prefill.name} did not answer again")
        again.append(judged.rows[0])
        if not rows_apart(judged.rows[1], own.rows[0]) <= tolerance:
            wrong.append(prefill)
    if len(wrong) == 1:
        says = f"{says}; {wrong[0].name} differs from D, too: its weights or kernels are wrong"
        return CheckResult("wrong", wrong[0], says)
    if not wrong and rows_apart(*again) <= tolerance:
        return CheckResult("passing", first.prefill, f"{says}; {one} computed it right when it was asked again")
    whose = "both differ" if wrong else "neither differs"
    return CheckResult("unclear", says=f"{says}; D cannot tell which is wrong: {whose} from it")


def rows_apart(one: bytes, other: bytes) -> float:
    """Return the largest difference (nats) between two rows' logprobs of their likeliest tokens; infinite if one is not
    a number. A token that is in one list only has at most the least logprob of the other list."""
    tops = dict(unpack_logprobs(one).top), dict(unpack_logprobs(other).top)
    apart = 0.0
    for mine, theirs in (tops, tops[::-1]):
        least = min(theirs.values(), default=float("nan"))
        for token, value in mine.items():
            gap = abs(value - theirs[token]) if token in theirs else value - least
            if gap != gap:
                return float("inf")
            apart = max(apart, gap)
    return apart if all(tops) else float("inf")
