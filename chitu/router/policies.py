"""Types of routing.

A policy is a pure function `(request, group) -> position`: which instance of a group gets a request. It keeps no state.
Its inputs are values: the turn, random bits, what each instance has to do, and which instances were sent the prompt's
beginning before. P and D are chosen one after the other, each by its own policy; `selector.py` makes the values.

Round robin: every instance in turn, whatever the load.

Least loaded: P by prompt tokens still to compute, the others by requests; ties go round robin.

Power of two choices: the less loaded of two that are drawn at random.

Nearly as even as least loaded, but several routers that see the same load reports do not all choose the same instance
(M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

Prefix affinity: the instance that was sent the beginning of the prompt before, as far as the load allows.

It pays if instances keep the KV of prompts that they computed: turns of one chat, one long document, one system prompt.
A match and the load are compared as one cost (`prefix_index.py` has the worth of a match). So an owner is passed over
once it is that much busier, and the instance that takes the request instead becomes an owner too: a beginning that
every request uses spreads as far as its load needs, a short one at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from chitu.errors import ConfigError
from chitu.protocol import ClusterView, InstanceInfo
from chitu.types import Role, instance_name

_NO_MATCHES: Mapping[InstanceKey, int] = MappingProxyType({})


class InstanceKey(NamedTuple):
    """One incarnation of one instance."""

    role: Role
    engine_rank: int
    incarnation: int

    @property
    def name(self) -> str:
        return instance_name(self.role, self.engine_rank)


def instance_key(instance: InstanceInfo) -> InstanceKey:
    return InstanceKey(instance.role, instance.engine_rank, instance.incarnation)


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a policy knows of the request, for one of its halves."""

    turn: int
    """Number of the request in the order of round robin for this half."""
    num_tokens: int
    """Prompt tokens."""
    entropy: int = 0
    """64 random bits of this request's own."""
    matches: Mapping[InstanceKey, int] = _NO_MATCHES
    """Instances that were sent the beginning of this prompt before, and its worth in tokens. Empty unless the policy
    uses it."""


@dataclass(slots=True, frozen=True)
class InstanceGroup:
    """The instances of one role that may get new requests. Made once per view; never empty when a policy sees it."""

    instances: tuple[InstanceInfo, ...]
    costs: list[int]
    """Outstanding work of each, kept up to date by `Members`: prompt tokens to compute on P, requests elsewhere."""
    positions: Mapping[InstanceKey, int]
    """Index of each in `instances`."""
    counts_tokens: bool
    """Whether `costs` are tokens (P) or requests."""


class Target(NamedTuple):
    """A pair (prefill and decode), or `prefill` None and `decode` the D or unified instance that does both halves."""

    prefill: InstanceInfo | None
    decode: InstanceInfo
    new_tokens: int = 0
    """Prompt tokens that are likely to be computed there, because they are not cached."""
    wait_s: float = 0.0
    """Predicted wait there, if there was a choice of ways."""


@dataclass(slots=True, frozen=True)
class Candidates:
    """The members of a view that may get new requests, in rank order."""

    prefill: tuple[InstanceInfo, ...] = ()
    decode: tuple[InstanceInfo, ...] = ()
    unified: tuple[InstanceInfo, ...] = ()

    @classmethod
    def in_view(cls, view: ClusterView) -> Candidates:
        # While new requests wait, those that change their weights count, too: nothing goes there before they have.
        return cls.among(view.instances, None if view.weights.holds else view.weights.serve.number)

    @classmethod
    def among(cls, instances: Iterable[InstanceInfo], weights: int | None = None) -> Candidates:
        """Return those of the instances that serve weights of this number; None: whatever they serve."""
        usable = sorted(
            (i for i in instances if not i.draining and weights in (None, i.weights.number)),
            key=lambda i: i.engine_rank,
        )
        return cls(
            tuple(i for i in usable if i.role is Role.PREFILL),
            tuple(i for i in usable if i.role is Role.DECODE),
            tuple(i for i in usable if i.role is Role.UNIFIED),
        )

    @property
    def has_pair(self) -> bool:
        return bool(self.prefill and self.decode)

    @property
    def usable_alone(self) -> bool:
        """Whether an instance can serve a request alone: a unified one, or a D that computes prompts."""
        return bool(self.unified) or any(d.computes for d in self.decode)

    @property
    def usable(self) -> bool:
        return self.has_pair or self.usable_alone

    @property
    def serving(self) -> tuple[InstanceInfo, ...]:
        """Instances that new requests may go to."""
        pairs = self.prefill + self.decode if self.has_pair else tuple(d for d in self.decode if d.computes)
        return pairs + self.unified

    def why_unusable(self) -> str:
        """Return a clause on what is missing; empty if a request can be served."""
        if self.usable:
            return ""
        missing = [name for name, group in (("prefill", self.prefill), ("decode", self.decode)) if not group]
        return f"no {' and no '.join(missing)} instance is ready"


Policy = Callable[[RoutingRequest, InstanceGroup], int]


def round_robin(request: RoutingRequest, group: InstanceGroup) -> int:
    return request.turn % len(group.costs)


def least_loaded(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the position of the least cost. Two passes over small integers: microseconds with a thousand instances."""
    costs = group.costs
    least = min(costs)
    try:
        return costs.index(least, request.turn % len(costs))
    except ValueError:
        return costs.index(least)


def power_of_two(request: RoutingRequest, group: InstanceGroup) -> int:
    costs, entropy = group.costs, request.entropy
    if len(costs) == 1:
        return 0
    first = entropy % len(costs)
    second = (entropy >> 32) % (len(costs) - 1)
    if second >= first:
        second += 1
    return first if costs[first] <= costs[second] else second


def prefix_affinity(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the least loaded position, unless an owner's match is worth more than the load that it has beyond that."""
    chosen = least_loaded(request, group)
    if not request.matches:
        return chosen
    costs = group.costs
    unit = 1 if group.counts_tokens else 1 / request.num_tokens
    best: float = costs[chosen]
    for key, worth in request.matches.items():
        position = group.positions.get(key)
        if position is not None and costs[position] - unit * worth < best:
            best, chosen = costs[position] - unit * worth, position
    return chosen


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
}


def make_policy(name: str) -> Policy:
    """Return the policy of that name in the configuration. Raises ConfigError for any other name."""
    if name not in POLICIES:
        raise ConfigError(f"router.policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]
