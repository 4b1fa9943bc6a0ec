"""What every instance has to do, as the router knows it: one number per instance for policies to compare.

Owned by `PairSelector`, on the loop thread. Invariant: `InstanceGroup.costs` of the newest view are the costs of its
instances at any moment. A request changes two numbers in them, so a decision only reads these lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chitu.protocol import InstanceInfo, LoadReport
from chitu.router.policies import InstanceGroup, InstanceKey, instance_key
from chitu.types import Role


@dataclass(slots=True)
class RoutedLoad:
    """Load of one instance: what this router has outstanding there, always exact, and what only its reports show. Both
    are costs: prompt tokens still to compute on P, requests elsewhere."""

    own: int = 0
    """Cost of requests sent there and not over (on P: until the first token)."""
    from_others: int = 0
    """Cost of what other routers sent there: the last report minus this router's share."""
    cached_share: float = 0.0
    """`LoadReport.cached_share` of the last report."""
    costs: list[int] = field(default_factory=lambda: [0])
    position: int = 0
    """Cost list of its group in the newest view that has it, and index in it."""

    def write(self) -> None:
        self.costs[self.position] = self.own + self.from_others


class LoadTable:
    def __init__(self) -> None:
        self._loads: dict[InstanceKey, RoutedLoad] = {}

    def add(self, key: InstanceKey) -> None:
        """Add an instance that joined. Idempotent."""
        self._loads.setdefault(key, RoutedLoad())

    def remove(self, key: InstanceKey) -> None:
        self._loads.pop(key, None)

    def arrange(self, roles: Sequence[tuple[InstanceInfo, ...]]) -> list[InstanceGroup]:
        """Return new groups, one per role, that replace all earlier ones."""
        return [self._group(instances) for instances in roles]

    def _group(self, instances: tuple[InstanceInfo, ...]) -> InstanceGroup:
        positions = {instance_key(instance): position for position, instance in enumerate(instances)}
        costs = [0] * len(instances)
        for key, position in positions.items():
            self.add(key)
            load = self._loads[key]
            load.costs, load.position = costs, position
            load.write()
        return InstanceGroup(instances, costs, positions, bool(instances) and instances[0].role is Role.PREFILL)

    def new_tokens(self, key: InstanceKey, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt an instance is likely to compute, if nothing is known of the prompt."""
        load = self._loads.get(key)
        return prompt_tokens if load is None else max(1, round(prompt_tokens * (1 - load.cached_share)))

    def count(self, key: InstanceKey, requests: int, new_tokens: int) -> None:
        """Count requests that were sent to an instance or (negative) are over there, with the prompt tokens to compute
        for them. Does nothing if it is gone."""
        load = self._loads.get(key)
        if load is not None:
            load.own += new_tokens if key.role is Role.PREFILL else requests
            load.costs[load.position] = load.own + load.from_others  # as `write` does, whose call costs as much

    def report(self, key: InstanceKey, report: LoadReport) -> None:
        """Take an instance's report of its own load, up to a heartbeat old."""
        load = self._loads.get(key)
        if load is None:
            return
        if key.role is Role.PREFILL:
            reported = report.waiting_tokens
        else:
            reported = report.waiting + report.transferring + report.running + report.retracted
        load.from_others, load.cached_share = max(0, reported - load.own), report.cached_share
        load.write()
