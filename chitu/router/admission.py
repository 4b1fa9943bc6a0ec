"""Early rejection: a request that would wait too long is refused at once, with the time after which to retry.

Owned by `PDRequestRouter`, on the loop thread. The waits are what the loads of the members predict
(`InstanceLoad.prompt_wait_s`, `pages_wait_s`): until the first chunk of a prompt is computed, and until there are pages
for it. Both halves of a request queue at the same time, so the longer wait counts. Before a request is parsed, the mean
of all instances of a role counts, unless one has room, and of several ways (pairs, unified instances, D alone) that in
which it would wait least. Once the cheapest of several ways was chosen for it, the wait there counts.

Invariants: nothing is rejected while nothing waits; more work ahead never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import Overloaded
from chitu.router.members import Members, longest_wait_s

FEW, LOOK_S = 64, 0.02
"""So many instances are looked at for each request; more of them after this time."""


class Admission:
    """Admission of requests. Call `require` (cheaply, before one is parsed) and `require_way` before it is sent."""

    def __init__(self, config: RouterConfig, members: Members, clock: Clock) -> None:
        self.max_wait_s = longest_wait_s(config)
        self._members = members
        self._clock = clock
        self._looked_s = -math.inf
        """When `_waits_s` were predicted."""
        self._waits_s = 0.0, 0.0

    def require(self) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s` whichever way it goes, with the time until
        it would not."""
        prompt_s, pages_s = self.predicted_waits_s()
        if max(prompt_s, pages_s) > self.max_wait_s:
            what = "a prompt is computed" if prompt_s >= pages_s else "a decode instance has pages"
            self._refuse(max(prompt_s, pages_s), what)

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

    def predicted_waits_s(self) -> tuple[float, float]:
        """Return how long a request sent now would wait for its first chunk, and for its pages, in the way that makes
        it wait least; 0 if unknown."""
        members, now_s = self._members, self._clock.monotonic()
        candidates = members.candidates
        prefill, decode, unified = members.prefill.loads, members.decode.loads, members.unified.loads
        if now_s - self._looked_s < LOOK_S and len(prefill) + len(decode) + len(unified) > FEW:
            return self._waits_s
        ways = [(prefill, decode)] if candidates.has_pair else []
        ways += [(alone, alone) for alone in (unified, tuple(load for load in decode if load.computes)) if alone]
        waits = [
            (_mean(load.prompt_wait_s(now_s) for load in computes), _mean(load.pages_wait_s(now_s) for load in decodes))
            for computes, decodes in ways
        ]
        self._looked_s, self._waits_s = now_s, min(waits, key=max, default=(0.0, 0.0))
        return self._waits_s


def _mean(waits_s: Iterable[float]) -> float:
    """Return the mean of waits, among which routing spreads the requests; 0 if an instance has room."""
    total_s, count = 0.0, 0
    for wait_s in waits_s:
        if not wait_s:
            return 0.0
        total_s, count = total_s + wait_s, count + 1
    return total_s / count
