"""Early rejection: a request that would wait too long is refused at once, with the time after which to retry.

Owned by `PDRequestRouter`, on the loop thread. Pure: load reports, what was sent since, and a clock come in; a verdict
comes out. The wait until a prompt's first chunk is the work ahead of it divided by the rate at which such a queue
moves:

* Work ahead: the newest report, plus what this router sent since, minus what was worked off meanwhile.
* Rate: measured over the time in which something waited (`LoadReport.backlog_*`), because an instance without a queue
  works only as fast as requests come. Until something has waited, the rate is unknown, and everything is admitted.
* P counts in prompt tokens, D in requests. Both halves of a request queue at the same time: the longer wait counts.
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
from chitu.router.routing.policy import Candidates, InstanceKey, instance_key
from chitu.types import Role

MEMORY_S = (2.0, 10.0)
"""Bounds of a rate's time constant: what was measured that many seconds of backlog ago counts by 1/e. Between them it
is the longest wait that may be predicted: a promise of a short wait needs an early sign of a slower instance."""
TURNOVER = 0.25
"""D's rate is updated once this share of what it runs was replaced: requests that began together end together, and the
pause before that is no rate."""
LOOK_S = 0.02
"""Shortest time between two passes over the reports, however many instances and requests there are."""
MARGIN = 2 / 3
"""Largest share of the instances' own deadlines that a wait may take: a request must not time out in the queue that it
was admitted to."""


@dataclass(slots=True)
class QueueEstimate:
    """One instance's queue according to its reports, in its unit."""

    role: Role
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

    def report(self, load: LoadReport, now_s: float) -> None:
        is_decode = self.role is Role.DECODE
        self.reported = load.waiting if is_decode else load.waiting_tokens
        if is_decode and load.unread == load.waiting:
            self.reported = 0  # no queue: no request that was looked at was left waiting
        self.reported_s, self.sent = now_s, 0
        seconds, work = load.backlog_s - self._taken[0], load.backlog_work - self._taken[1]
        enough = max(1.0, TURNOVER * (load.running + load.transferring)) if is_decode else 1.0
        if work < enough or seconds <= 0:
            return
        self._taken = (load.backlog_s, load.backlog_work)
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
        if self.is_free:
            return 0.0
        worked_off = (self.rate or 0.0) * (now_s - self.reported_s)
        return max(0.0, self.reported + self.sent - worked_off)


class RoleQueue:
    """The queues of all instances of one role as one."""

    def __init__(self, queues: Iterable[QueueEstimate]) -> None:
        self._queues = tuple(queues)
        self._looked_s = -math.inf
        self._ahead = 0.0
        self._rate: float | None = None

    def sent(self, amount: int) -> None:
        self._ahead += amount

    def predicted_wait_s(self, now_s: float) -> float:
        """Return the wait until the first chunk (P, unified) or the pages (D) of a request sent now; 0 if unknown."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._ahead = sum(queue.ahead(now_s) for queue in self._queues)
            rates = [queue.rate for queue in self._queues]
            known = [rate for rate in rates if rate is not None]
            # An instance that never had a queue has room.
            self._rate = sum(known) if known and len(known) == len(rates) else None
        return self._ahead / self._rate if self._rate else 0.0


class Admission:
    """Admission of requests. Call `require` before a request is sent (and, cheaply, before it is parsed); the rest
    keeps it informed."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        deadlines, wanted_s = config.pd_disaggregation.deadlines, config.admission.max_queue_s
        survivable_s = min(MARGIN * min(deadlines.queue_s, deadlines.transfer_s), config.request_timeout_s)
        self.max_wait_s = survivable_s if wanted_s is None else min(wanted_s, survivable_s)
        self._memory_s = min(max(MEMORY_S[0], self.max_wait_s), MEMORY_S[1])
        self._clock = clock
        self._queues: dict[InstanceKey, QueueEstimate] = {}
        self._prefill = self._decode = RoleQueue(())

    def require(self) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s`, with the time until it would not."""
        now_s = self._clock.monotonic()
        of_prefill, of_decode = self._prefill.predicted_wait_s(now_s), self._decode.predicted_wait_s(now_s)
        wait_s = max(of_prefill, of_decode)
        if wait_s <= self.max_wait_s:
            return
        what = "a prompt is computed" if of_prefill >= of_decode else "a decode instance has pages"
        raise Overloaded(
            f"the wait until {what} would be {wait_s:.1f} s, more than {self.max_wait_s:g} s "
            "(router.admission.max_queue_s); try again later",
            wait_s - self.max_wait_s,
        )

    def on_view(self, candidates: Candidates) -> None:
        """Apply a new cluster view. Only instances that may get requests count."""
        known = self._queues
        keys = [instance_key(instance) for instance in candidates.serving]
        self._queues = {key: known.get(key) or QueueEstimate(key.role, self._memory_s) for key in keys}
        queues = self._queues.values()
        self._prefill = RoleQueue(queue for queue in queues if queue.role is not Role.DECODE)
        self._decode = RoleQueue(queue for queue in queues if queue.role is Role.DECODE)

    def on_report(self, key: InstanceKey, load: LoadReport) -> None:
        """Take an instance's report of its own load, perhaps ahead of the view that has it."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = QueueEstimate(key.role, self._memory_s)
        queue.report(load, self._clock.monotonic())

    def forget(self, key: InstanceKey) -> None:
        """Drop what is known of an instance that is gone."""
        self._queues.pop(key, None)

    def on_sent(self, key: InstanceKey, prompt_tokens: int) -> None:
        """Count a request (or its half) that was sent to an instance."""
        queue = self._queues.get(key)
        if queue is None:
            return
        is_decode = key.role is Role.DECODE
        amount = 1 if is_decode else prompt_tokens
        queue.sent += amount
        if not queue.is_free:
            (self._decode if is_decode else self._prefill).sent(amount)
