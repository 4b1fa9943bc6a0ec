"""What every instance has to do, as the router knows it: a number per instance, ready for policies to compare.

Owned by `PairSelector`, on the loop thread. Invariant: `InstanceGroup.costs` of the newest view are the costs of its
instances at any moment; a request changes two numbers in them, so no decision has to look at more than these lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chitu.protocol import InstanceInfo, LoadReport
from chitu.router.routing.policy import InstanceGroup, InstanceKey, instance_key
from chitu.types import Role


@dataclass(slots=True)
class RoutedLoad:
    """Load of one instance: what this router has outstanding there, exact at once, and what only its reports show."""

    role: Role
    requests: int = 0
    """Sent there and not over (on P: until the first token)."""
    prompt_tokens: int = 0
    """Their prompt tokens."""
    from_others: int = 0
    """Cost of what other routers sent there, in the unit of `cost`: the last report without our own share."""

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
        """Where the cost of an instance stands in the groups of the newest view."""

    def add(self, key: InstanceKey) -> None:
        """An instance joined. Idempotent."""
        self._loads.setdefault(key, RoutedLoad(key.role))

    def remove(self, key: InstanceKey) -> None:
        self._loads.pop(key, None)
        self._places.pop(key, None)

    def arrange(self, roles: Sequence[tuple[InstanceInfo, ...]]) -> list[InstanceGroup]:
        """New groups, one per role, in place of all earlier ones."""
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
        """Requests were sent to an instance, or (negative) are over there. Of one that is gone: nothing."""
        load = self._loads.get(key)
        if load is not None:
            load.requests += requests
            load.prompt_tokens += prompt_tokens
            self._write(key, load)

    def report(self, key: InstanceKey, report: LoadReport) -> None:
        """An instance's own view of its load, up to a heartbeat old."""
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
