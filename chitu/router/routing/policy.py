"""Types of routing.

A policy is a pure function `(request, group) -> position`: which instance of a group gets a request. It keeps no state.
Its inputs are values: the turn, random bits, what each instance has to do, and which instances were sent the prompt's
beginning before. P and D are chosen one after the other, each by its own policy; `selector.py` makes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from chitu.protocol import ClusterView, InstanceInfo
from chitu.types import Role, instance_name


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


_NO_MATCHES: Mapping[InstanceKey, int] = MappingProxyType({})


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
    """Outstanding work of each, kept up to date by the load table: prompt tokens to compute on P, requests
    elsewhere."""
    positions: Mapping[InstanceKey, int]
    """Index of each in `instances`."""
    counts_tokens: bool
    """Whether `costs` are tokens (P) or requests."""


class Target(NamedTuple):
    """A pair (prefill and decode), or `prefill` None and `decode` the unified instance that does both halves."""

    prefill: InstanceInfo | None
    decode: InstanceInfo
    new_tokens: int = 0
    """Prompt tokens that are likely to be computed there, because they are not cached."""


@dataclass(slots=True, frozen=True)
class Candidates:
    """The members of a view that may get new requests, in rank order."""

    prefill: tuple[InstanceInfo, ...] = ()
    decode: tuple[InstanceInfo, ...] = ()
    unified: tuple[InstanceInfo, ...] = ()

    @classmethod
    def of(cls, view: ClusterView) -> Candidates:
        usable = sorted((i for i in view.instances if not i.draining), key=lambda i: i.engine_rank)
        return cls(
            tuple(i for i in usable if i.role is Role.PREFILL),
            tuple(i for i in usable if i.role is Role.DECODE),
            tuple(i for i in usable if i.role is Role.UNIFIED),
        )

    def without(self, gone: Set[InstanceKey]) -> Candidates:
        """Return the candidates except those."""
        groups = (self.prefill, self.decode, self.unified)
        return Candidates(*(tuple(i for i in group if instance_key(i) not in gone) for group in groups))

    @property
    def has_pair(self) -> bool:
        return bool(self.prefill and self.decode)

    @property
    def usable(self) -> bool:
        return self.has_pair or bool(self.unified)

    @property
    def serving(self) -> tuple[InstanceInfo, ...]:
        """Instances that new requests go to: the pairs if there is one, else the unified ones."""
        return self.prefill + self.decode if self.has_pair else self.unified

    def why_unusable(self) -> str:
        """Return a clause on what is missing; empty if a request can be served."""
        if self.usable:
            return ""
        missing = [name for name, group in (("prefill", self.prefill), ("decode", self.decode)) if not group]
        return f"no {' and no '.join(missing)} instance is ready"


Policy = Callable[[RoutingRequest, InstanceGroup], int]
