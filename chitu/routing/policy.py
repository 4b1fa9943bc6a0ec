"""The words of routing.

A policy is a pure function `(request, candidates, loads) -> Target`. It keeps no state: what it needs to spread
requests (their ordinal) and to balance them (what the router sent where) comes in as values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from chitu.errors import NoInstance
from chitu.messages import ClusterView, InstanceInfo, LoadReport
from chitu.types import Role


class InstanceKey(NamedTuple):
    """One incarnation of one instance."""

    role: Role
    engine_rank: int
    incarnation: int


def instance_key(instance: InstanceInfo) -> InstanceKey:
    return InstanceKey(instance.role, instance.engine_rank, instance.incarnation)


@dataclass(slots=True, frozen=True)
class RoutingRequest:
    ordinal: int
    """Attempts before this one, over all requests: rotates ties and round robin."""
    num_tokens: int
    """Prompt tokens."""


@dataclass(slots=True)
class InstanceLoad:
    """Load of one instance: what this router has outstanding there, exact at once, and its last own report."""

    requests: int = 0
    """Sent there and not over (on P: until the first token)."""
    prompt_tokens: int = 0
    """Their prompt tokens."""
    report: LoadReport = field(default_factory=LoadReport)


@dataclass(slots=True, frozen=True)
class Target:
    """A pair (prefill and decode), or `prefill` None and `decode` the unified instance that does both halves."""

    prefill: InstanceInfo | None
    decode: InstanceInfo


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

    @property
    def has_pair(self) -> bool:
        return bool(self.prefill and self.decode)

    @property
    def usable(self) -> bool:
        return self.has_pair or bool(self.unified)

    @property
    def serving(self) -> tuple[InstanceInfo, ...]:
        """The instances that new requests go to: the pairs where there is one, else the unified ones."""
        return self.prefill + self.decode if self.has_pair else self.unified

    def why_unusable(self) -> str:
        """One clause on what is missing; empty where a request can be served."""
        if self.usable:
            return ""
        missing = [name for name, group in (("prefill", self.prefill), ("decode", self.decode)) if not group]
        return f"no {' and no '.join(missing)} instance is ready"


Loads = Mapping[InstanceKey, InstanceLoad]
Policy = Callable[[RoutingRequest, Candidates, Loads], Target]


def require_usable(candidates: Candidates) -> None:
    if not candidates.usable:
        raise NoInstance(candidates.why_unusable())
