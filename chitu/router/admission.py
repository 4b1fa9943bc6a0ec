"""Early rejection: a request that would wait too long is refused at once, with the time after which to retry.

Owned by `PDRequestRouter`, on the loop thread. Pure: load reports, what was sent since, and a clock come in; a verdict
comes out. The wait until a prompt's first chunk is the work ahead of it divided by the rate at which such a queue
moves:

* Work ahead: the newest report, plus what this router sent since, minus what was worked off meanwhile.
* Rate: measured over the time in which something waited (`LoadReport.backlog_*`), because an instance without a queue
  works only as fast as requests come. Until something has waited, and again a while after, the rate is unknown, and
  everything is admitted.
* P counts in prompt tokens that it has to compute, D in requests. Both halves of a request queue at the same time: the
  longer wait counts. A unified instance has both queues, one for its steps and one for its slots and pages.
* All instances of a role count together, because routing spreads the load over them.

Invariants: nothing is rejected while nothing waits; more work ahead never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import Overloaded
from chitu.protocol import LoadReport
from chitu.router.policies import Candidates, InstanceKey, instance_key
from chitu.types import Role

MEMORY_S = (2.0, 10.0)
"""Bounds of a rate's time constant: what was measured that many seconds of backlog ago counts by 1/e. Between them it
is the longest wait that may be predicted: a promise of a short wait needs an early sign of a slower instance."""
EXPIRES = 3
"""A rate is forgotten once nothing has waited for this many time constants: the next queue may be of other requests."""
TURNOVER = 0.25
"""D's rate is updated once this share of what it runs was replaced: requests that began together end together, and the
pause before that is no rate."""
SHORTEST_S = 1e-6
"""Shortest time of backlog from which a rate is taken."""
LOOK_S = 0.02
"""Shortest time between two passes over the reports, however many instances and requests there are."""
MARGIN = 2 / 3
"""Largest share of the instances' own deadlines that a wait may take: a request must not time out in the queue that it
was admitted to."""


@dataclass(slots=True)
class QueueEstimate:
    """One instance's queue according to its reports, in its unit."""

    role: Role
    """PREFILL: the queue for steps, in prompt tokens. DECODE: the queue for slots and pages, in requests."""
    is_unified: bool = False
    """Whether it is one of the two queues of a unified instance."""
    memory_s: float = MEMORY_S[1]
    reported: int = 0
    reported_s: float = 0.0
    sent: int = 0
    """Sent by this router since the report."""
    rate: float | None = None
    """Units a second; None while unknown."""
    _seconds: float = 0.0
    _work: float = 0.0
    """`_seconds` and `_work` of backlog, decaying."""
    _taken: tuple[float, int] = (0.0, 0)
    """Counters of the report that both sums already include."""
    _waited: tuple[float, float] = (0.0, 0.0)
    """Seconds of backlog that the newest report shows, and when they last grew."""

    def report(self, load: LoadReport, now_s: float) -> None:
        counters, enough = (load.backlog_s, load.backlog_work), 1.0
        if self.role is Role.DECODE:
            if self.is_unified:
                counters = load.decode_backlog_s, load.decode_backlog_work
            enough = max(1.0, TURNOVER * (load.running + load.transferring))
            # No queue if no request that was looked at was left waiting, or only by the queue of P.
            self.reported = 0 if load.unread + load.held_by_prefill >= load.waiting else load.waiting
            if load.held_by_prefill:  # it moves as P computes
                self._taken, self._waited = counters, (counters[0], self._waited[1])
        else:
            self.reported = load.waiting_tokens - load.joinable_tokens
        self.reported_s, self.sent = now_s, 0
        if counters[0] != self._waited[0]:
            self._waited = counters[0], now_s
        elif self.rate is not None and now_s - self._waited[1] > EXPIRES * self.memory_s:
            self.rate, self._seconds, self._work, self._taken = None, 0.0, 0.0, counters
        seconds, work = counters[0] - self._taken[0], counters[1] - self._taken[1]
        if work < enough or seconds < SHORTEST_S:
            return
        self._taken = counters
        kept = math.exp(-seconds / self.memory_s)
        share = self.memory_s * (1 - kept) / seconds  # a long stretch has decayed too by its end
        self._seconds = self._seconds * kept + seconds * share
        self._work = self._work * kept + work * share
        self.rate = self._work / self._seconds

    @property
    def is_free(self) -> bool:
        """Whether it is a D without a queue: what was sent there most likely got its pages at once, or will in the next
        step."""
        return self.role is Role.DECODE and not self.reported

    def ahead(self, now_s: float) -> float:
        """Return how much work a request that is sent now waits behind."""
        return 0.0 if self.is_free else max(0.0, self.sent + self._left(now_s))

    def queued(self, now_s: float) -> float:
        """Return how much of this waited when the instance reported."""
        return max(0.0, self._left(now_s))

    def _left(self, now_s: float) -> float:
        return self.reported - (self.rate or 0.0) * (now_s - self.reported_s)


class RoleQueue:
    """The queues of all instances of one role as one."""

    def __init__(self, queues: Iterable[QueueEstimate]) -> None:
        self._queues = tuple(queues)
        self._looked_s = -math.inf
        self._ahead = self._queued = 0.0
        self._rate: float | None = None

    def sent(self, amount: int) -> None:
        self._ahead += amount

    def __len__(self) -> int:
        return len(self._queues)

    def predicted_wait_s(self, now_s: float, most_sent: float = math.inf) -> float:
        """Return the wait until the first chunk, or until the pages, of a request sent now; 0 if unknown. Of what was
        sent since the reports, at most `most_sent` is left."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._ahead = sum(queue.ahead(now_s) for queue in self._queues)
            self._queued = sum(queue.queued(now_s) for queue in self._queues)
            rates = [queue.rate for queue in self._queues]
            known = [rate for rate in rates if rate is not None]
            # An instance that never had a queue has room.
            self._rate = sum(known) if known and len(known) == len(rates) else None
        return min(self._ahead, self._queued + most_sent) / self._rate if self._rate else 0.0


class Admission:
    """Admission of requests. Call `require` before a request is sent (and, cheaply, before it is parsed); the rest
    keeps it informed."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        deadlines, wanted_s = config.pd_disaggregation.deadlines, config.admission.max_queue_s
        survivable_s = min(MARGIN * min(deadlines.queue_s, deadlines.transfer_s), config.request_timeout_s)
        self.max_wait_s = survivable_s if wanted_s is None else min(wanted_s, survivable_s)
        self._memory_s = min(max(MEMORY_S[0], self.max_wait_s), MEMORY_S[1])
        self._clock = clock
        self._num_processes = config.workers
        """API processes, which are taken to have equal shares of the requests."""
        self._queues: dict[InstanceKey, tuple[QueueEstimate, ...]] = {}
        self._prefill = self._decode = RoleQueue(())

    def require(self, num_waiting: float = math.inf, new_tokens: float = math.inf) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s`, with the time until it would not.
        `num_waiting`: requests of this process that have no token yet, with `new_tokens` to compute. No more of what
        was sent since the reports waits."""
        of_prefill, of_decode = self.predicted_waits_s(num_waiting, new_tokens)
        wait_s = max(of_prefill, of_decode)
        if wait_s <= self.max_wait_s:
            return
        what = "a prompt is computed" if of_prefill >= of_decode else "a decode instance has pages"
        raise Overloaded(
            f"the wait until {what} would be {wait_s:.1f} s, more than {self.max_wait_s:g} s "
            "(router.admission.max_queue_s); try again later",
            wait_s - self.max_wait_s,
        )

    def predicted_waits_s(self, num_waiting: float, new_tokens: float) -> tuple[float, float]:
        """Return how long a request sent now would wait for its first chunk, and for its pages; 0 if unknown."""
        now_s, num_sent = self._clock.monotonic(), num_waiting * self._num_processes
        # With one prompt at each P none waits.
        most_tokens = new_tokens * self._num_processes if num_sent > len(self._prefill) else 0.0
        return self._prefill.predicted_wait_s(now_s, most_tokens), self._decode.predicted_wait_s(now_s, num_sent)

    def on_view(self, candidates: Candidates) -> None:
        """Apply a new cluster view. Only instances that may get requests count."""
        known = self._queues
        keys = [instance_key(instance) for instance in candidates.serving]
        self._queues = {key: known.get(key) or self._new_queues(key) for key in keys}
        queues = [queue for queues in self._queues.values() for queue in queues]
        self._prefill = RoleQueue(queue for queue in queues if queue.role is Role.PREFILL)
        self._decode = RoleQueue(queue for queue in queues if queue.role is Role.DECODE)

    def _new_queues(self, key: InstanceKey) -> tuple[QueueEstimate, ...]:
        is_unified = key.role is Role.UNIFIED
        roles = (Role.PREFILL, Role.DECODE) if is_unified else (key.role,)
        return tuple(QueueEstimate(role, is_unified, self._memory_s) for role in roles)

    def on_report(self, key: InstanceKey, load: LoadReport) -> None:
        """Take an instance's report of its own load, perhaps ahead of the view that has it."""
        queues = self._queues.get(key)
        if queues is None:
            queues = self._queues[key] = self._new_queues(key)
        for queue in queues:
            queue.report(load, self._clock.monotonic())

    def forget(self, key: InstanceKey) -> None:
        """Drop the records of an instance that is gone."""
        self._queues.pop(key, None)

    def on_sent(self, key: InstanceKey, new_tokens: int) -> None:
        """Count a request (or its half) that was sent to an instance, which has to compute `new_tokens` for it."""
        for queue in self._queues.get(key, ()):
            is_decode = queue.role is Role.DECODE
            amount = 1 if is_decode else new_tokens
            queue.sent += amount
            if not queue.is_free:
                (self._decode if is_decode else self._prefill).sent(amount)
