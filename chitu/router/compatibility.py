"""Why two instances cannot be in one cluster: different models or pages, or no transport between their memories. Pure.

Called by the router for each instance that joins (`pd_coordination.py`). P and D write into each other's pages; a
unified instance only has to have the same model. An E writes features to P: it has the same model and a transport to P,
and compares the rest of its layout, which is one of features, when a P registers with it. All live P and D fit each
other, so a new one is compared with one member of each kind (`MemberKinds`), however many members there are.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from chitu.protocol import InstanceInfo, KVLayout
from chitu.types import Role

PD = "dp_config.router.pd_disaggregation"
MEMORY = {"cpu": "host memory", "cuda": "GPU memory"}


class InstanceKind(NamedTuple):
    """What decides whether an instance fits another one."""

    role: Role
    layout: KVLayout
    device: str
    ways: tuple[str, ...]
    """Its ways to other machines, or all of its ways if none leaves the machine."""


def kind_of(info: InstanceInfo) -> InstanceKind:
    far = tuple(way for way in info.ways if "@" not in way)
    return InstanceKind(info.role, info.layout, info.device, far or info.ways)


class MemberKinds:
    """The members by kind."""

    def __init__(self) -> None:
        self._members: dict[InstanceKind, dict[int, InstanceInfo]] = {}
        """By kind, then by rank."""

    def add(self, info: InstanceInfo) -> None:
        self._members.setdefault(kind_of(info), {})[info.engine_rank] = info

    def remove(self, info: InstanceInfo) -> None:
        kind = kind_of(info)
        members = self._members[kind]
        del members[info.engine_rank]
        if not members:
            del self._members[kind]

    def why_incompatible(self, new: InstanceInfo) -> str:
        """Return why it fits one of the members, other than the one whose place it takes, not; empty if it fits."""
        for kind, members in self._members.items():
            others = (info for info in members.values() if (info.role, info.engine_rank) != (new.role, new.engine_rank))
            # Members of one kind differ only in the ways within their machines.
            is_far = new.role is kind.role or not new.ways or not kind.ways or not set(new.ways).isdisjoint(kind.ways)
            for other in islice(others, 1) if is_far else others:
                if reason := why_incompatible(new, other):
                    return reason
        return ""


def why_incompatible(new: InstanceInfo, other: InstanceInfo) -> str:
    """Return a sentence with both sides and the remedy; empty if they fit."""
    if Role.ENCODE in (new.role, other.role):
        return _why_not_encoded(new, other)
    is_paired = Role.UNIFIED not in (new.role, other.role)
    mismatches = new.layout.mismatches(other.layout)
    model = [mismatch for mismatch in mismatches if mismatch.startswith(("model_hash:", "vocab_size:"))]
    if model:
        return f"{_two(new, other)} ({'; '.join(model)}){_layouts(new, other)}: give both the same checkpoint"
    if adapters := [mismatch for mismatch in mismatches if mismatch.startswith("adapters:")]:
        return f"{_two(new, other)} ({adapters[0]}): give both the same LoRA adapters (model.adapters)"
    if not is_paired:
        return ""
    # Devices first: a difference of dtypes may follow from them.
    if reason := _why_other_memory(new, other):
        return reason
    if mismatches:
        return f"{_two(new, other)} ({'; '.join(mismatches)}){_layouts(new, other)}: start both with the same topology"
    return _why_unreachable(new, other) if new.role is not other.role else ""


def _why_not_encoded(new: InstanceInfo, other: InstanceInfo) -> str:
    """Return why two do not fit of which one is an E."""
    hashes = new.layout.model_hash, other.layout.model_hash
    if hashes[0] != hashes[1]:
        return f"{_two(new, other)} (model_hash: {hashes[0]} != {hashes[1]}): give both the same checkpoint"
    if {Role.PREFILL, Role.UNIFIED}.isdisjoint((new.role, other.role)):
        return ""
    return _why_other_memory(new, other) or _why_unreachable(new, other)


def _why_other_memory(new: InstanceInfo, other: InstanceInfo) -> str:
    if not (new.device and other.device) or new.device == other.device:
        return ""
    return (
        f"{_two(new, other)}: {new.name} has its pages in {MEMORY.get(new.device, new.device)}, {other.name} in "
        f"{MEMORY.get(other.device, other.device)}, and {_roles(new, other)} need the same kind of device: "
        "`chitu doctor` reports why a node has none, or have all on CPUs with CUDA_VISIBLE_DEVICES= (empty)"
    )


def _why_unreachable(new: InstanceInfo, other: InstanceInfo) -> str:
    if not (new.ways and other.ways) or set(new.ways) & set(other.ways):
        return ""
    return (
        f"{_two(new, other)}: no transport reaches from one to the other. {new.name} has {_words(new)}; "
        f"{other.name} has {_words(other)}: {_cure(new, other)}"
    )


def _roles(new: InstanceInfo, other: InstanceInfo) -> str:
    if Role.ENCODE in (new.role, other.role):
        return "unified instances and E" if Role.UNIFIED in (new.role, other.role) else "P and E"
    return "P and D"


def _two(new: InstanceInfo, other: InstanceInfo) -> str:
    return f"{new.name} on {new.host} does not fit {other.name} on {other.host}"


def _words(info: InstanceInfo) -> str:
    return ", ".join(way.partition("@")[0] for way in info.ways)


def _cure(new: InstanceInfo, other: InstanceInfo) -> str:
    have = [any(way.startswith("mooncake") for way in info.ways) for info in (new, other)]
    if all(have):
        return f"set {PD}.mooncake_protocol=tcp on all nodes, or fix RDMA on the nodes without it (`chitu doctor`)"
    if any(have):
        without = (new, other)[have.index(False)]
        return f"install Mooncake on {without.host}, too (`chitu doctor`)"
    return f"between machines set {PD}.transport=mooncake; on one machine run both as one user in one container"


def _layouts(new: InstanceInfo, other: InstanceInfo) -> str:
    return f". {new.name}: {new.layout}. {other.name}: {other.layout}"
