"""Weights that change while the cluster serves: what the router wants (in the view), what an instance has (in its
heartbeats). Both are repeated as a whole, so nothing depends on a message that might be lost."""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.protocol.wire import Wire

PauseMode = Literal["", "finish", "keep"]
"""How an operator has paused a cluster: running requests end, or stop where they are. Empty: not at all."""
SleepLevel = Literal[0, 1, 2]
"""What an instance has given back: nothing, the memory of KV pages, or that of the weights, too."""
SLEEP_VERSION = 21
"""Version of the wire since which instances can sleep."""
ADAPTERS_VERSION = 21
"""Version of the wire from which on an instance changes its LoRA adapters while it serves."""
MAX_ADAPTERS = 64
"""Most LoRA adapters after a change of them: each heartbeat and each record of the view names all."""


class ServedAdapter(Wire, frozen=True, array_like=True):
    """A LoRA adapter that requests may choose."""

    name: str
    path: str
    """Folder, on every instance."""
    hash: str = ""
    """As in `KVLayout.adapters`; empty until the instances have read it."""


class Weights(Wire, frozen=True):
    """The weights that an instance computes with."""

    number: int = 0
    """Number of the change that brought them; 0: those that the instance was started with. Larger is newer. No two
    routers give one, except those of 0.1.0 and those that are told of different numbers of routers."""
    model_hash: str = ""
    """As in KVLayout; empty with number 0, where the layout has it."""
    path: str = ""
    """Folder, on every instance."""
    is_mixed: bool = False
    """Requests that ran when they came went on with them."""
    unmixed: int = 0
    """Of mixed ones: number of the last change before them that was not mixed."""
    sleep: SleepLevel = 0
    """Not 0: the instance sleeps, and has these again once it wakes. It accepts no request before."""

    @property
    def awake(self) -> Weights:
        """The same, of an instance that does not sleep."""
        return msgspec.structs.replace(self, sleep=0) if self.sleep else self

    adapters: tuple[ServedAdapter, ...] | None = None
    """LoRA adapters beside the model, by name; None: those that the instance was started with."""
    base: int = 0
    """With `adapters`: number of the last change of the model's own weights; those after it changed adapters alone."""

    @property
    def age(self) -> tuple[int, str, str]:
        """Sort key: the larger one is newer. Two changes of one number are ordered by their hashes."""
        return self.number, self.model_hash, " ".join([f"{one.name}={one.hash}" for one in self.adapters or ()])

    @property
    def base_number(self) -> int:
        """Number of the last change of the model's own weights."""
        return self.number if self.adapters is None else self.base

    @property
    def key(self) -> tuple[int, str, tuple[tuple[str, str], ...]]:
        """What names a change before its hashes are known, and orders those of one number."""
        return self.number, self.path, tuple([(one.name, one.path) for one in self.adapters or ()])

    def goes_on_from(self, earlier: Weights) -> bool:
        """Return whether a request that has tokens of earlier weights may have tokens of these, too: every change in
        between was mixed. Of two changes of one number neither goes on from the other."""
        if earlier.number == self.number:
            return earlier.age == self.age
        return earlier.number >= (self.unmixed if self.is_mixed else self.number)


class Pause(Wire, frozen=True):
    """An operator's last word on whether a cluster is paused, as a router has it."""

    number: int = 0
    """Grows with every pause and every end of one, at any router: the largest counts."""
    mode: PauseMode = ""
    sleep: SleepLevel = 0
    """Level at which the instances sleep once nothing runs; 0: they do not. The mode is `finish` then, which releases
    that know no sleep obey."""
    stays: bool = False
    """With `sleep`: requests do not end it, but are refused."""

    @property
    def age(self) -> tuple[int, str, int, bool]:
        """Sort key: the larger one counts. Of two with one number, of two routers, the one that pauses more."""
        return self.number, self.mode, self.sleep, self.stays


class WeightsOrder(Wire, frozen=True):
    """What the router wants of every instance, in the view."""

    serve: Weights = Weights()
    """An instance with older ones reads these, changes to them, and gets no request before."""
    prepare: Weights | None = None
    """To be read and checked beside those that serve; without a hash, which the instances report."""
    holds: bool = False
    """New requests wait on the routers."""
    pause: Pause = Pause()
    may_sleep: bool = False
    """With a pause that sleeps: nothing runs on any instance, so none needs another one."""

    @property
    def freezes(self) -> bool:
        """Whether instances start no step: what runs there stays as it is."""
        return self.pause.mode == "keep"


class WeightsReport(Wire, frozen=True):
    """What an instance has."""

    serves: Weights = Weights()
    prepared: Weights | None = None
    """Weights that it has read, or could not read."""
    error: str = ""
    """Why it could not."""
    holds: bool = False
    """As in the orders that it has: so the other routers learn that new requests wait."""
    pause: Pause = Pause()
    """The one that counts, of those in the orders."""
    is_drained: bool = False
    """With `holds`: no request runs here, of any router."""
    freed_bytes: int = 0
    """Of one that sleeps: memory that it has given back, on all ranks."""
    keeps: str = ""
    """Of one that sleeps: what it could not give back, and why."""
    no_sleep: str = ""
    """With a pause that sleeps: why it does not. It stays drained."""
    leaving: tuple[tuple[str, int], ...] = ()
    """LoRA adapters that serve no more, and how many requests still run with each."""
