"""Early rejection: a request that would wait too long is refused at once, with the time after which to retry.

Owned by `PDRequestRouter`, on the loop thread. The waits are what the loads of the members predict
(`InstanceLoad.waits_s`): until the first chunk of a prompt is computed, and until there are pages for it. Both halves
of a request queue at the same time, so the longer wait counts. Before a request is parsed, the shortest wait counts
that any way would have; once the cheapest of several ways was chosen for it, the wait there.

Invariants: nothing is rejected while nothing waits; more work ahead never predicts a shorter wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import Overloaded
from chitu.router.loads import InstanceLoad
from chitu.router.members import Members, longest_wait_s

LOOK_S = 0.02
"""Time for which all queues are known to be too long, however many instances and requests there are."""


class Admission:
    """Admission of requests. Call `require` (cheaply, before one is parsed) and `require_way` before it is sent."""

    def __init__(self, config: RouterConfig, members: Members, clock: Clock) -> None:
        self.max_wait_s = longest_wait_s(config)
        self._members = members
        self._clock = clock
        self._looked_s = -math.inf
        """When no way was found with a wait that is short enough, and `_waits_s`, what the shortest one was."""
        self._waits_s = 0.0, 0.0

    def require(self) -> None:
        """Raise Overloaded if a request would wait longer than `max_wait_s` whichever way it goes, with the time until
        it would not."""
        now_s = self._clock.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._waits_s = self.predicted_waits_s(self.max_wait_s)
            if max(self._waits_s) <= self.max_wait_s:
                return
            self._looked_s = now_s
        prompt_s, pages_s = self._waits_s
        self._refuse(
            max(self._waits_s), "a prompt is computed" if prompt_s >= pages_s else "a decode instance has pages"
        )

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

    def predicted_waits_s(self, enough_s: float = 0.0) -> tuple[float, float]:
        """Return how long a request sent now would wait for its first chunk, and for its pages, in the way that makes
        it wait least; 0 if unknown. A way with waits up to `enough_s` is as good as any."""
        members, now_s = self._members, self._clock.monotonic()
        candidates = members.candidates

        def least(loads: Iterable[InstanceLoad]) -> tuple[float, float]:
            found = (math.inf, math.inf)
            for load in loads:
                found = min(found, load.waits_s(now_s), key=max)
                if max(found) <= enough_s:
                    break
            return found

        waits = [least(members.unified.loads), least(load for load in members.decode.loads if load.computes)]
        if candidates.has_pair:
            waits.append((least(members.prefill.loads)[0], least(members.decode.loads)[1]))
        shortest = min(waits, key=max)
        return shortest if max(shortest) < math.inf else (0.0, 0.0)
