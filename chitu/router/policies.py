"""Policies: which instance of a group is proposed for a request.

A policy is a pure function `(request, group) -> position`. It keeps no state.
Its inputs are values: the turn, random bits, what each instance has to do, and which instances were sent the prompt's
beginning before. P and D are chosen one after the other, each by its own policy; `ways.py` makes the values.

Round robin: every instance in turn, whatever the load.

Least loaded: P by prompt tokens still to compute, the others by requests; ties go round robin.

Power of two choices: the less loaded of two that are drawn at random.

Nearly as even as least loaded, but several routers that see the same load reports do not all choose the same instance
(M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

Prefix affinity: the instance that was sent the beginning of the prompt before, as far as the load allows.

It pays if instances keep the KV of prompts that they computed: turns of one chat, one long document, one system prompt.
A match and the load are compared as one cost (`prefix_history.py` has the worth of a match). So an owner is passed over
once it is that much busier, and the instance that takes the request instead becomes an owner too: a beginning that
every request uses spreads as far as its load needs, a short one at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from chitu.errors import ConfigError
from chitu.router.candidates import InstanceKey
from chitu.router.loads import InstanceGroup

NO_MATCHES: Mapping[InstanceKey, int] = MappingProxyType({})


class RoutingRequest(msgspec.Struct, frozen=True):
    """What a policy knows of the request, for one of its halves."""

    turn: int
    """Number of the request in the order of round robin for this half."""
    num_tokens: int
    """Prompt tokens."""
    entropy: int = 0
    """64 random bits of this request's own."""
    matches: Mapping[InstanceKey, int] = NO_MATCHES
    """Instances that were sent the beginning of this prompt before, and its worth in tokens. Empty unless the policy
    uses it."""


Policy = Callable[[RoutingRequest, InstanceGroup], int]


def round_robin(request: RoutingRequest, group: InstanceGroup) -> int:
    return request.turn % len(group.works)


def least_loaded(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the position of the least work. Two passes over small integers: microseconds with a thousand instances."""
    works = group.works
    least = min(works)
    try:
        return works.index(least, request.turn % len(works))
    except ValueError:
        return works.index(least)


def power_of_two(request: RoutingRequest, group: InstanceGroup) -> int:
    works, entropy = group.works, request.entropy
    if len(works) == 1:
        return 0
    first = entropy % len(works)
    second = (entropy >> 32) % (len(works) - 1)
    if second >= first:
        second += 1
    return first if works[first] <= works[second] else second


def prefix_affinity(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the least loaded position, unless an owner's match is worth more than the load that it has beyond that."""
    chosen = least_loaded(request, group)
    if not request.matches:
        return chosen
    works = group.works
    unit = 1 if group.counts_tokens else 1 / request.num_tokens
    best: float = works[chosen]
    for key, worth in request.matches.items():
        position = group.positions.get(key)
        if position is not None and works[position] - unit * worth < best:
            best, chosen = works[position] - unit * worth, position
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
