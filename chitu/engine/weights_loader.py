"""What changes the weights of an executor's model: `weights.py` for one rank, `tp_executor.py` for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from chitu.protocol.weights import SleepLevel


class AdapterFolder(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter to be read, and the number that it gets (`Admit.adapter`)."""

    number: int
    name: str
    path: str


class ReadWeights(msgspec.Struct, frozen=True, array_like=True):
    """Result of reading a folder, or adapters, on all ranks."""

    model_hash: str = ""
    """Empty if no folder of weights was read."""
    error: str = ""
    """Why its weights cannot replace those that serve; empty if they can."""
    fingerprint: bytes | None = None
    """For the keys of cached pages; None if nothing is cached."""
    feature_mark: bytes = b""
    """As in `ExecutorInfo`."""
    adapters: tuple[str, ...] = ()
    """Hashes of the adapters that were read, in their order."""


class GivenBack(msgspec.Struct, frozen=True, array_like=True):
    """What `sleep` has given back, on all ranks."""

    num_bytes: int = 0
    keeps: str = ""
    """What could not be given back, and why."""


class WeightsLoader(Protocol):
    """Reads weights beside those that serve, and puts them in their place. Step thread."""

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        """Start to read a folder (empty: the weights that serve stay) and adapters, and drop what was read before."""
        ...

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None:
        """Start to read those that `sleep` gave back, and refuse others. An empty path: the folder of the start. And
        adapters, as `begin` does."""
        ...

    def poll(self) -> ReadWeights | None:
        """Return what was read; None while it is being read, and if `begin` was not called."""
        ...

    def change(self) -> None:
        """Put what was read in the place of the weights that serve, and beside them the adapters. No step is in
        flight."""
        ...

    def unload(self, number: int) -> None:
        """Give back the memory of an adapter, which no slot has."""
        ...

    def drop(self) -> None:
        """Forget what was read, or is being read."""
        ...

    def why_no_sleep(self, level: SleepLevel) -> str:
        """Return why memory cannot be given back; empty if it can."""
        ...

    def sleep(self, level: SleepLevel) -> GivenBack:
        """Give back the memory of pages, at level 2 of the weights, too, which `begin` and `change` bring back. The
        pages are zeros then. No step is in flight, and nothing is cached."""
        ...


class NoLoader:
    """Loader of an engine whose weights cannot be changed."""

    def begin(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None: ...

    def begin_again(self, path: str, adapters: Sequence[AdapterFolder] = ()) -> None: ...

    def poll(self) -> ReadWeights | None:
        return ReadWeights(error="this engine cannot change its weights")

    def change(self) -> None: ...

    def unload(self, number: int) -> None: ...

    def drop(self) -> None: ...

    def why_no_sleep(self, level: SleepLevel) -> str:
        return "this engine has no memory to give back"

    def sleep(self, level: SleepLevel) -> GivenBack:
        return GivenBack()
