"""What every instance has to do, as the router knows it: one number per instance for policies to compare.

Owned by `PairSelector`, on the loop thread. Invariant: `InstanceGroup.costs` of the newest view are the costs of its
instances at any moment. A request changes two numbers in them, so a decision only reads these lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chitu.protocol import InstanceInfo, LoadReport
from chitu.router.routing.policy import InstanceGroup, InstanceKey, instance_key
from chitu.types import Role


@dataclass(slots=True)
class RoutedLoad:
    """Load of one instance: what this router has outstanding there, always exact, and what only its reports show."""

    role: Role
    requests: int = 0
    """Requests sent there and not over (on P: until the first token)."""
    prompt_tokens: int = 0
    """Prompt tokens of these requests."""
    from_others: int = 0
    """Cost of what other routers sent there, in the unit of `cost`: the last report minus this router's share."""

    @property
    def own_cost(self) -> int:
        return self.prompt_tokens if self.role is Role.PREFILL else self.requests

    @property
    def cost(self) -> int:
        """Prompt tokens still to compute on P, requests elsewhere."""
        return self.own_cost + self.from_others


class LoadTable:
    def __init__(self) -> None:
        self._loads: dict[InstanceKey, RoutedLoad] = {}
        self._places: dict[InstanceKey, tuple[list[int], int]] = {}
        """Cost list, and index in it, of each instance in the groups of the newest view."""

    def add(self, key: InstanceKey) -> None:
        """Add an instance that joined. Idempotent."""
        self._loads.setdefault(key, RoutedLoad(key.role))

    def remove(self, key: InstanceKey) -> None:
        self._loads.pop(key, None)
        self._places.pop(key, None)

    def arrange(self, roles: Sequence[tuple[InstanceInfo, ...]]) -> list[InstanceGroup]:
        """Return new groups, one per role, that replace all earlier ones."""
        self._places = {}
        return [self._group(instances) for instances in roles]

    def _group(self, instances: tuple[InstanceInfo, ...]) -> InstanceGroup:
        keys = [instance_key(instance) for instance in instances]
        for key in keys:
            self.add(key)
        costs = [self._loads[key].cost for key in keys]
        positions = {key: position for position, key in enumerate(keys)}
        self._places.update({key: (costs, position) for key, position in positions.items()})
        return InstanceGroup(instances, costs, positions, bool(instances) and instances[0].role is Role.PREFILL)

    def count(self, key: InstanceKey, requests: int, prompt_tokens: int) -> None:
        """Count requests that were sent to an instance or (negative) are over there. Does nothing if it is gone."""
        load = self._loads.get(key)
        if load is not None:
            load.requests += requests
            load.prompt_tokens += prompt_tokens
            self._write(key, load)

    def report(self, key: InstanceKey, report: LoadReport) -> None:
        """Take an instance's report of its own load, up to a heartbeat old."""
        load = self._loads.get(key)
        if load is None:
            return
        if key.role is Role.PREFILL:
            reported = report.waiting_tokens
        else:
            reported = report.waiting + report.transferring + report.running + report.retracted
        load.from_others = max(0, reported - load.own_cost)
        self._write(key, load)

    def _write(self, key: InstanceKey, load: RoutedLoad) -> None:
        place = self._places.get(key)
        if place is not None:
            costs, position = place
            costs[position] = load.cost
