"""The instances that may get new requests, how they are named, and the way of a request among them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from chitu.protocol import ClusterView, InstanceInfo
from chitu.protocol.weights import Weights
from chitu.types import Role, instance_name

NO_GROUPS: Groups = MappingProxyType({})


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


Groups = Mapping[InstanceKey, frozenset[InstanceKey]]
"""For an instance of a group all members of the group. Instances that are alone are left out."""


def with_groups(keys: Iterable[InstanceKey | None], groups: Groups) -> frozenset[InstanceKey]:
    """Return these instances with all members of their groups. None is left out."""
    return frozenset(each for key in keys if key is not None for each in groups.get(key, (key,)))


def whole_groups(instances: Iterable[InstanceInfo]) -> list[InstanceInfo]:
    """Return those that are in no group, or in one whose members are all among them and have one role: the members of a
    group serve together or not at all."""
    found = list(instances)
    counts = Counter((each.group.id, each.role) for each in found if each.group is not None)
    if not counts:
        return found
    return [each for each in found if each.group is None or counts[each.group.id, each.role] == each.group.size]


class Way(NamedTuple):
    """How a request is served: by a pair, or with `prefill` None by a D or a unified instance alone."""

    prefill: InstanceInfo | None
    decode: InstanceInfo
    new_tokens: int = 0
    """Prompt tokens that are likely to be computed, because they are not cached there."""
    encoders: tuple[int, ...] = ()
    """Who encodes its images: `RequestHead.encoders`."""


@dataclass(slots=True, frozen=True)
class Candidates:
    """The members of a view that may get new requests, in rank order."""

    prefill: tuple[InstanceInfo, ...] = ()
    decode: tuple[InstanceInfo, ...] = ()
    unified: tuple[InstanceInfo, ...] = ()
    partial: tuple[str, ...] = ()
    """Names of those that wait for other members of their groups."""
    encode: tuple[InstanceInfo, ...] = ()
    """Those that encode images for the others, which get no requests themselves."""

    @classmethod
    def in_view(cls, view: ClusterView) -> Candidates:
        # While new requests wait, those that change their weights count, too: nothing goes there before they have.
        return cls.among(view.instances, None if view.weights.holds else view.weights.serve)

    @classmethod
    def among(cls, instances: Iterable[InstanceInfo], weights: Weights | None = None) -> Candidates:
        """Return those of the instances that serve these weights and do not sleep; None: whatever they do. A group
        counts once all its members do."""
        able = [i for i in instances if not i.draining]
        if weights is not None:
            able = [i for i in able if i.weights == weights]
        usable = sorted(whole_groups(able), key=lambda i: i.engine_rank)
        names = {i.name for i in usable} if len(usable) < len(able) else set()
        return cls(
            tuple(i for i in usable if i.role is Role.PREFILL),
            tuple(i for i in usable if i.role is Role.DECODE),
            tuple(i for i in usable if i.role is Role.UNIFIED),
            tuple(i.name for i in able if i.name not in names) if len(usable) < len(able) else (),
            tuple(i for i in usable if i.role is Role.ENCODE),
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
        partial = f"; other members of the group of {', '.join(self.partial)} are not here" if self.partial else ""
        return f"no {' and no '.join(missing)} instance is ready{partial}"
