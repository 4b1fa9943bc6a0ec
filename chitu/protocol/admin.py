"""What the calls of operators on the whole cluster answer. Another router reads the first two: it asks the one that
decides (`cluster/other_routers.py`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.protocol.weights import PauseMode, SleepLevel


class DrainReply(msgspec.Struct):
    """An instance that was asked to finish and leave."""

    instance: str
    incarnation: str
    """Incarnation in decimal. It distinguishes this process from one that takes its place."""
    status: Literal["draining"]


class RoleReply(msgspec.Struct):
    """An instance that was asked to change its role."""

    instance: str
    incarnation: str
    """Incarnation that drains, in decimal."""
    becomes: str
    """Name under which the instance will join, with another incarnation."""


class ProfileReply(msgspec.Struct):
    """Instances that were asked to record what they compute."""

    instances: list[str]
    label: str
    """The files are `LABEL-INSTANCE.RANK.trace.json.gz`, in `trace.profile_dir` on the machine of each instance."""
    seconds: float
    steps: int


class WeightsState(msgspec.Struct, frozen=True):
    """Which weights the cluster serves."""

    model_hash: str
    """Hash of the model with these weights; empty if no instance has them."""
    path: str
    """Their folder; empty: that of the topology."""
    number: int
    """Changes since the start of the cluster."""
    missing: list[str]
    """Instances that do not have them yet, and get no requests before."""
    paused: PauseMode | Literal["sleep"]
    """Whether an operator has paused the cluster, and how."""


class Sleeper(msgspec.Struct, frozen=True):
    """What an instance has given back."""

    instance: str
    level: SleepLevel
    """0: nothing, it is awake."""
    freed_bytes: int
    """Memory of all its ranks that the system has again."""
    keeps: str
    """What it could not give back, and why."""


class SleepState(msgspec.Struct, frozen=True):
    """Whether the cluster sleeps."""

    level: SleepLevel
    """Level that was asked for; 0: it is to be awake."""
    wake_on_request: bool
    """Whether a request wakes it."""
    instances: list[Sleeper]
    missing: list[str]
    """While it is to be awake: instances that cannot serve yet, with the reason if one cannot read its weights."""


class AdapterState(msgspec.Struct, frozen=True):
    """A LoRA adapter that requests may choose."""

    name: str
    path: str
    """Its folder; empty if this router does not know it."""
    hash: str
    """Hash of all bytes of its files."""


class AdaptersState(msgspec.Struct, frozen=True):
    """Which LoRA adapters the cluster serves."""

    adapters: list[AdapterState]
    number: int
    """Changes since the start of the cluster, of weights and of adapters."""
    missing: list[str]
    """Instances that do not have them yet, and get no requests before."""
    leaving: list[str]
    """Adapters that serve no more, by instance, and how many requests still run with each."""


class Canary(msgspec.Struct, frozen=True):
    """The share of requests that goes to one revision of the instances."""

    revision: str
    """Label of the revision; empty: no share is set, and each gets requests by the number of its instances."""
    share: float
    """From 0 (none) to 1 (all), while other revisions can serve."""
