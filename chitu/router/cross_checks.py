"""Check whether a second P computes the same logits for a prompt as the first, and if not, which is wrong. Pure.

`cross_check` is a generator: it yields computations to be made and is sent their results. `CrossChecks` runs it.

0. If pages of the answer did not land on D as P wrote them, by the checksums of both, the transfer is at fault.
1. A second P computes the whole prompt of an answer that was given, without its cache. The rows of logits after the
   prompt must agree. Every weight, and every page of the prompt's KV, contributes to that row.
2. If they do not agree, D judges. It computes the row of the next position from the pages of each P, and that P
   computes the row, too. A P whose weights or kernels are wrong disagrees with what D made of its pages; the other one
   does not.
3. If neither disagrees with D, and the first P now computes what the second did, then its answer was wrong and its
   weights are not: pages of its cache are damaged, or the fault was transient.

How far rows may differ follows what D and a sound P differ by (`SoundNoise`): of two P the one that is nearer to D. The
first checks measure it, so D judges in them even if the two P are right. A fault that moves no logprob of the likeliest
tokens by more than that limit is not detected.

Cross-checks of P (`verify_compute`): which requests are checked, and the requests that a check itself makes.

Owned by `PDRequestRouter`, on the loop thread, which calls `sampled` when a request comes and `tick` by the timer. Only
`tick` starts new requests. One check runs at a time, with the lowest priority, which is worth a time (ADR 41): in a
longer queue checks have their turn, too. A checked request brings the logprobs of its first token, which its reader
does not see.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from chitu.errors import ChituError
from chitu.log import about
from chitu.protocol import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    SamplingParams,
    TransferSums,
    logprob_limit,
    pack_i32,
    unpack_logprobs,
)
from chitu.router.attempts import Attempts
from chitu.router.generation import GenerateRequest, Generation
from chitu.router.members import Members
from chitu.router.policies import InstanceKey, instance_key

logger = logging.getLogger(__name__)

Outcome = Literal["agreed", "wrong", "passing", "damaged", "unclear", "unanswered"]
SUM_BYTES = 8
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
KEPT_NOISE = 64
FRACTIONS = {"off": 0.0, "sample": 0.01, "all": 1.0}
"""Fraction of requests that are checked, by `verify_compute`."""
ANSWER_S = 60.0
"""Seconds within which a computation of a check must be done."""


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
    damage: str = ""
    """What was damaged on its way to D; empty if nothing was."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. `agreed`; `wrong`: `guilty` computes wrongly; `passing`: `guilty` gave one wrong answer;
    `damaged`: pages did not land on D as P wrote them; `unclear`: two P disagree, and D cannot decide which is right;
    `unanswered`: there was no second P, or it failed."""

    outcome: Outcome
    guilty: InstanceKey | None = None
    says: str = ""


UNANSWERED = CheckResult("unanswered")


class SoundNoise:
    """The last differences (nats) between what D and a sound P computed for the same tokens: what rounding does in this
    cluster. `limit` is that of `logprob_limit`, as with `chitu verify`."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._last: deque[float] = deque(maxlen=KEPT_NOISE)

    def add(self, difference: float) -> None:
        self._last.append(difference)

    @property
    def limit(self) -> float:
        return logprob_limit(max(self._last, default=0.0), self._dtype)


def cross_check(
    token_ids: bytes, first: Computed, noise: SoundNoise
) -> Generator[Recompute, Computed | None, CheckResult]:
    """Compare `first`, which was served, with a second P. Each computation is answered by its result, or by None if it
    has none. What is measured on the sound P is added to `noise`."""
    if first.damage:
        return CheckResult("damaged", says=first.damage)
    second = yield Recompute(token_ids, 1, first.prefill, by_another=True)
    if second is None or second.prefill == first.prefill:
        return UNANSWERED
    apart = rows_apart(first.rows[0], second.rows[0])
    if apart <= noise.limit:
        return CheckResult("agreed")
    one, other = first.prefill.name, second.prefill.name
    says = f"{one} and {other} differ by {apart:.3g} in the logprobs behind one prompt of {len(token_ids) // 4} tokens"
    from_d: dict[InstanceKey, float] = {}
    again: list[bytes] = []
    for prefill in (first.prefill, second.prefill):
        judged = yield Recompute(token_ids, 2, prefill)
        own = None
        if judged is not None and judged.damage:
            return CheckResult("damaged", says=judged.damage)
        if judged is not None and judged.prefill == prefill and len(judged.rows) == 2:
            own = yield Recompute(token_ids + pack_i32(judged.tokens[:1]), 1, prefill)
        if judged is None or own is None or own.prefill != prefill:
            return CheckResult("unclear", says=f"{says}; {prefill.name} did not answer again")
        again.append(judged.rows[0])
        from_d[prefill] = rows_apart(judged.rows[1], own.rows[0])
    noise.add(min(from_d.values()))
    if apart <= noise.limit:
        return CheckResult("agreed")
    says = f"{says}, where rounding explains {noise.limit:.3g}"
    wrong = [prefill for prefill, difference in from_d.items() if not difference <= noise.limit]
    if len(wrong) == 1:
        says = f"{says}; {wrong[0].name} differs from D, too: its weights or kernels are wrong"
        return CheckResult("wrong", wrong[0], says)
    if not wrong and rows_apart(*again) <= noise.limit:
        return CheckResult("passing", first.prefill, f"{says}; {one} was right when it computed the prompt again")
    whose = "both differ" if wrong else "neither differs"
    return CheckResult("unclear", says=f"{says}; D cannot decide which is wrong: {whose} from it")


def damage_in(moved: TransferSums | None, pair: str) -> str:
    """Return what was damaged between a P and a D, by the checksums of both; empty if nothing was."""
    if moved is None or moved.sent == moved.landed:
        return ""
    num_sums = len(moved.sent) // SUM_BYTES
    unlike = [n for n in range(num_sums) if _sum_at(moved.sent, n) != _sum_at(moved.landed, n)]
    num_pages = num_sums // moved.layers
    page, layer = min((n % num_pages, n // num_pages) for n in unlike)
    where = f"page {moved.first_page + page}" + (f", layer {layer}" if moved.layers > 1 else "")
    return f"{pair}: K and V differ between P and D: first in {where}"


def _sum_at(sums: bytes, index: int) -> bytes:
    return sums[SUM_BYTES * index : SUM_BYTES * (index + 1)]


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


Steps = Generator[Recompute, Computed | None, CheckResult]


class CrossChecks:
    """Runs the checks."""

    def __init__(self, verify_compute: str, attempts: Attempts, members: Members) -> None:
        self._fraction = FRACTIONS[verify_compute]
        self._attempts = attempts
        self._members = members
        self.results: list[CheckResult] = []
        """Every result except `agreed` and `unanswered`; the reader removes them."""
        self._checked_id, self._adapter = "", ""
        self._noise: SoundNoise | None = None
        self._running: tuple[Steps, Generation] | None = None
        """The running check, and the computation that it waits for."""

    def sampled(self, request: GenerateRequest) -> GenerateRequest | None:
        """Return the request as it is to be sent if it is to be checked, else None. Requests that ask for logprobs
        themselves are not checked."""
        if request.sampling.logprobs is not None or random.random() >= self._fraction:
            return None
        if len(self._members.candidates.prefill) < 2:
            return None
        sampling = msgspec.structs.replace(request.sampling, logprobs=MAX_LOGPROBS, transfer_sums=True)
        return msgspec.structs.replace(request, sampling=sampling)

    def forget(self) -> None:
        """Drop what waits and what runs: the instances have other weights than those of the answers."""
        self._attempts.checked.clear()
        self._running = None

    def tick(self) -> None:
        if self._running is not None and self._running[1].done:
            (steps, asked), self._running = self._running, None
            self._go_on(steps, _computed(asked))
        if self._running is None and self._attempts.checked:
            served = self._attempts.checked.popleft()
            computed = _computed(served)
            layouts = [instance.layout for instance in self._members.candidates.prefill]
            if computed is not None and layouts:
                self._checked_id, self._adapter = served.request.request_id, served.request.adapter
                self._noise = self._noise or SoundNoise(layouts[0].dtype)
                self._go_on(cross_check(served.request.token_ids, computed, self._noise), None)

    def _go_on(self, steps: Steps, computed: Computed | None) -> None:
        try:
            ask = steps.send(computed)
            while (asked := self._send(ask)) is None:
                ask = steps.send(None)
            self._running = steps, asked
        except StopIteration as end:
            self._judge(end.value)

    def _send(self, ask: Recompute) -> Generation | None:
        """Start a computation. Return None if no P that may compute it takes requests."""
        others = {instance_key(instance) for instance in self._members.candidates.prefill} - {ask.prefill}
        sampling = SamplingParams(
            max_tokens=ask.max_tokens, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True, transfer_sums=True
        )
        request = GenerateRequest(
            f"cross-check of {self._checked_id}",
            ask.token_ids,
            len(ask.token_ids) // 4,
            sampling,
            wake_per_token=False,
            cache_salt=None,
            priority=MAX_PRIORITY,
            adapter=self._adapter,
        )
        try:
            return self._attempts.start_alone(request, ANSWER_S, {ask.prefill} if ask.by_another else others)
        except ChituError:
            return None

    def _judge(self, result: CheckResult) -> None:
        self._attempts.counters.cross_checks[result.outcome] += 1
        if result.says:
            logger.error("cross-check: %s", result.says, extra=about(self._checked_id))
            self.results.append(result)


def _computed(generation: Generation) -> Computed | None:
    """Return what a generation computed; None if it has no token with logprobs."""
    if generation.first_prefill is None or not generation.logprobs:
        return None
    finish, (*_, last) = generation.finish, generation.ended
    pair = last.decode if last.prefill is None else f"{last.prefill}-{last.decode}"
    damage = damage_in(finish.transfer_sums, pair) if finish is not None else ""
    return Computed(generation.first_prefill, generation.output.tolist(), generation.logprobs, damage)
