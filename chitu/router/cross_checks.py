"""Cross-checks of P (`verify_compute`): which requests are checked, and the requests that a check itself makes.

Owned by `PDRequestRouter`, on the loop thread, which calls `sampled` when a request comes, `on_end` when it is over,
and `tick` by the timer. Only `tick` starts new requests. One check runs at a time, with the lowest priority, which is
worth a time (ADR 41): in a longer queue checks have their turn, too. If more than `WAITING` requests wait for one, the
oldest is dropped. A checked request brings the logprobs of its first token, which its reader does not see.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Set

import msgspec

from chitu.errors import ChituError
from chitu.log import about
from chitu.protocol import MAX_LOGPROBS, MAX_PRIORITY, SamplingParams
from chitu.router.cross_check import CheckResult, Computed, Recompute, SoundNoise, cross_check, damage_in
from chitu.router.generation import GenerateRequest, Generation
from chitu.router.metrics import RouterMetrics
from chitu.router.routing import Candidates, InstanceKey, instance_key

log = logging.getLogger(__name__)

FRACTIONS = {"off": 0.0, "sample": 0.01, "all": 1.0}
"""Fraction of requests that are checked, by `verify_compute`."""
WAITING = 16
ANSWER_S = 60.0
"""Seconds within which a computation of a check must be done."""

Start = Callable[[GenerateRequest, Set[InstanceKey]], Generation]
"""Sends a request to instances other than these, if there are any; raises a ChituError if it cannot be sent."""
Steps = Generator[Recompute, Computed | None, CheckResult]


class CrossChecks:
    """Runs the checks. `on_wrong` receives every result except `agreed` and `unanswered`."""

    def __init__(
        self,
        verify_compute: str,
        start: Start,
        candidates: Callable[[], Candidates],
        counters: RouterMetrics,
        on_wrong: Callable[[CheckResult], None],
    ) -> None:
        self._fraction = FRACTIONS[verify_compute]
        self._start = start
        self._candidates = candidates
        self._counters = counters
        self._on_wrong = on_wrong
        self._ended: deque[Generation] = deque(maxlen=WAITING)
        self._checked_id = ""
        self._noise: SoundNoise | None = None
        self._running: tuple[Steps, Generation] | None = None
        """The running check, and the computation that it waits for."""

    def sampled(self, request: GenerateRequest) -> GenerateRequest | None:
        """Return the request as it is to be sent if it is to be checked, else None. Requests that ask for logprobs
        themselves are not checked."""
        if request.sampling.logprobs is not None or random.random() >= self._fraction:
            return None
        if len(self._candidates().prefill) < 2:
            return None
        sampling = msgspec.structs.replace(request.sampling, logprobs=MAX_LOGPROBS, transfer_sums=True)
        return msgspec.structs.replace(request, sampling=sampling)

    def on_end(self, generation: Generation) -> None:
        """Queue a checked request that is over, however it ended, if it has logprobs."""
        if generation.first_prefill is not None and generation.logprobs:
            self._ended.append(generation)

    def tick(self) -> None:
        if self._running is not None and self._running[1].done:
            (steps, asked), self._running = self._running, None
            self._go_on(steps, _computed(asked))
        if self._running is None and self._ended:
            served = self._ended.popleft()
            computed = _computed(served)
            layouts = [instance.layout for instance in self._candidates().prefill]
            if computed is not None and layouts:
                self._checked_id = served.request.request_id
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
        others = {instance_key(instance) for instance in self._candidates().prefill} - {ask.prefill}
        sampling = SamplingParams(
            max_tokens=ask.max_tokens, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True, transfer_sums=True
        )
        request = GenerateRequest(
            f"cross-check of {self._checked_id}",
            ask.token_ids,
            len(ask.token_ids) // 4,
            sampling,
            wake_per_token=False,
            timeout_s=ANSWER_S,
            cache_salt=None,
            priority=MAX_PRIORITY,
        )
        try:
            return self._start(request, {ask.prefill} if ask.by_another else others)
        except ChituError:
            return None

    def _judge(self, result: CheckResult) -> None:
        self._counters.cross_checks[result.outcome] += 1
        if result.says:
            log.error("cross-check: %s", result.says, extra=about(self._checked_id))
            self._on_wrong(result)


def _computed(generation: Generation) -> Computed | None:
    """Return what a generation computed; None if it has no token with logprobs."""
    if generation.first_prefill is None or not generation.logprobs:
        return None
    finish, (*_, last) = generation.finish, generation.ended
    pair = last.decode if last.prefill is None else f"{last.prefill}-{last.decode}"
    damage = damage_in(finish.transfer_sums, pair) if finish is not None else ""
    return Computed(generation.first_prefill, generation.output.tolist(), generation.logprobs, damage)
