"""Circuit breakers: an instance that failed several times in a row gets no requests for a while, then one as a probe.

Owned by `PDRequestRouter`, on the loop thread. Pure: outcomes and the time come in, the set of instances to leave out
comes out. Closed: requests come. Open: none come. Half-open: the time is up, and one request may try. Its failure opens
the breaker again for twice as long; any success closes it. A probe without an outcome (its client left, or it takes
long) is followed by another after the same time, so a breaker cannot stay half-open for ever.

Invariant: an instance without failures costs nothing here; the selector still uses those left out if there are no
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chitu.config.schema import BreakerConfig
from chitu.router.policies import InstanceKey

BreakerState = Literal["closed", "open", "half_open"]
NO_INSTANCES: frozenset[InstanceKey] = frozenset()


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    """Failures in a row."""
    open_s: float = 0.0
    """Seconds that it stays open this time; 0 while closed."""
    again_s: float = 0.0
    """Time at which the next request may go there."""
    is_probing: bool = False
    """A request was sent as a probe, and its outcome is not known yet."""


class Breakers:
    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._breakers: dict[InstanceKey, _Breaker] = {}
        """Breakers of instances that failed since their last success."""
        self._num_open = 0
        """Number of open or half-open breakers among them."""

    def on_failure(self, key: InstanceKey, now_s: float) -> bool:
        """Count a failure that is this instance's fault. Return True if this opened its breaker (again)."""
        breaker = self._breakers.setdefault(key, _Breaker())
        breaker.failures += 1
        if breaker.open_s:
            if not breaker.is_probing:
                return False  # a request from before it opened
            breaker.open_s = min(2 * breaker.open_s, self._config.max_open_s)
        elif breaker.failures >= self._config.failures:
            breaker.open_s = self._config.open_s
            self._num_open += 1
        else:
            return False
        breaker.again_s, breaker.is_probing = now_s + breaker.open_s, False
        return True

    def on_success(self, key: InstanceKey) -> None:
        """Clear the failures of an instance that served a request to its end."""
        if self._breakers:
            self.forget(key)

    def forget(self, key: InstanceKey) -> None:
        """Remove the breaker of an instance that is gone, or healthy again."""
        breaker = self._breakers.pop(key, None)
        if breaker is not None and breaker.open_s:
            self._num_open -= 1

    def on_sent(self, key: InstanceKey, now_s: float) -> None:
        """Note that a request goes to this instance. If its breaker is half-open, this is the probe: no second one for
        now."""
        if not self._num_open:
            return
        breaker = self._breakers.get(key)
        if breaker is not None and breaker.open_s and breaker.again_s <= now_s:
            breaker.is_probing, breaker.again_s = True, now_s + breaker.open_s

    def blocked(self, now_s: float) -> frozenset[InstanceKey]:
        """Return the instances that get no request now."""
        if not self._num_open:
            return NO_INSTANCES
        return frozenset(key for key, breaker in self._breakers.items() if breaker.again_s > now_s)

    def state(self, key: InstanceKey, now_s: float) -> BreakerState:
        breaker = self._breakers.get(key)
        if breaker is None or not breaker.open_s:
            return "closed"
        return "half_open" if breaker.is_probing or breaker.again_s <= now_s else "open"
