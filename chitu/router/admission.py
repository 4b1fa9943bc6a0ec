"""Early rejection: a request that would wait too long is refused at once, with the time after which to retry.

Owned by `PDRequestRouter`, on the loop thread. Pure: the queues of the members (`QueueEstimate`) and a clock come in;
a verdict comes out. The wait until a prompt's first chunk is the work ahead of it divided by the rate at which such a
queue moves:

* Work ahead: the newest report, plus what this router sent since, minus what was worked off meanwhile.
* Rate: measured over the time in which something waited (`LoadReport.backlog_*`), because an instance without a queue
  works only as fast as requests come. Until something has waited, and again a while after, the rate is unknown, and
  everything is admitted.
* P counts in prompt tokens that it has to compute, D in requests. Both halves of a request queue at the same time: the
  longer wait counts. A unified instance has both queues, one for its steps and one for its slots and pages.
* All instances of a role count together, because routing spreads the load over them. Where a request can be served in
  several ways (pairs, unified instances, D alone), the shortest wait of them counts first, and then that of the way
  that routing has chosen, which is the cheapest (`require_way`).

Invariants: nothing is rejected while nothing waits; more work ahead never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.config.topology import router_hosts
from chitu.errors import Overloaded
from chitu.router.members import ClusterMember, Members, QueueEstimate, longest_wait_s
from chitu.router.policies import Candidates, instance_key
from chitu.types import Role

LOOK_S = 0.02
"""Shortest time between two passes over the reports, however many instances and requests there are."""


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
    """Admission of requests. Call `require` before a request is sent (and, cheaply, before it is parsed), and `on_sent`
    after it."""

    def __init__(self, config: RouterConfig, members: Members, clock: Clock) -> None:
        self.max_wait_s = longest_wait_s(config)
        self._members = members
        self._clock = clock
        self._num_routers = len(router_hosts(config))
        """Routers, which are taken to have equal shares of the requests."""
        self._candidates = Candidates()
        """Candidates whose queues these are."""
        self._queues: dict[tuple[Role, Role], RoleQueue] = {}
        """Queues of these by the role of their instances, and by their own: for prompts (PREFILL) and pages."""
        self._ways: list[tuple[RoleQueue, RoleQueue]] = []
        """Queues for the prompt and for the pages of each way to serve a request."""

    def require(self, num_waiting: float = math.inf, new_tokens: float = math.inf) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s`, with the time until it would not.
        `num_waiting`: requests of this process that have no token yet, with `new_tokens` to compute. No more of what
        was sent since the reports waits."""
        of_prefill, of_decode = self.predicted_waits_s(num_waiting, new_tokens)
        wait_s = max(of_prefill, of_decode)
        if wait_s <= self.max_wait_s:
            return
        self._refuse(wait_s, "a prompt is computed" if of_prefill >= of_decode else "a decode instance has pages")

    def require_way(self, wait_s: float) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s` in the way that was chosen for it. Among
        several ways one that nothing waits for may cost more than it is worth (`costs.py`)."""
        if wait_s > self.max_wait_s:
            self._refuse(wait_s, "an instance computes the prompt and has pages")

    def _refuse(self, wait_s: float, what: str) -> NoReturn:
        raise Overloaded(
            f"the wait until {what} would be {wait_s:.1f} s, more than {self.max_wait_s:g} s "
            "(router.admission.max_queue_s); try again later",
            wait_s - self.max_wait_s,
        )

    def predicted_waits_s(self, num_waiting: float, new_tokens: float) -> tuple[float, float]:
        """Return how long a request sent now would wait for its first chunk, and for its pages, in the way that makes
        it wait least; 0 if unknown."""
        if self._members.candidates is not self._candidates:
            self._arrange()
        now_s, num_sent = self._clock.monotonic(), num_waiting * self._num_routers
        waits = []
        for prefill, decode in self._ways:
            # With one prompt at each P none waits.
            most_tokens = new_tokens * self._num_routers if num_sent > len(prefill) else 0.0
            waits.append((prefill.predicted_wait_s(now_s, most_tokens), decode.predicted_wait_s(now_s, num_sent)))
        return min(waits, key=max, default=(0.0, 0.0))

    def _arrange(self) -> None:
        """Sum up the queues of the instances that new requests go to."""
        self._candidates = candidates = self._members.candidates
        members = [self._members.get(instance_key(info)) for info in candidates.serving]
        queues: dict[tuple[Role, Role], list[QueueEstimate]] = {}
        for member in filter(None, members):
            for queue in member.queues:
                queues.setdefault((member.key.role, queue.role), []).append(queue)
        self._queues = {roles: RoleQueue(of_role) for roles, of_role in queues.items()}
        ways = [(Role.UNIFIED, Role.UNIFIED), (Role.DECODE, Role.DECODE)]
        ways += [(Role.PREFILL, Role.DECODE)] if candidates.has_pair else []
        wanted = [((computes, Role.PREFILL), (decodes, Role.DECODE)) for computes, decodes in ways]
        self._ways = [
            (self._queues[prompt], self._queues[pages])
            for prompt, pages in wanted
            if prompt in self._queues and pages in self._queues
        ]

    def on_sent(self, member: ClusterMember, new_tokens: int) -> None:
        """Count a request (or its half) that was sent to an instance, which has to compute `new_tokens` for it."""
        member.costs.sent(new_tokens, self._clock.monotonic())
        for queue in member.queues:
            is_decode = queue.role is Role.DECODE
            amount = 1 if is_decode else new_tokens
            queue.sent += amount
            of_role = self._queues.get((member.key.role, queue.role))
            if of_role is not None and not queue.is_free:
                of_role.sent(amount)
