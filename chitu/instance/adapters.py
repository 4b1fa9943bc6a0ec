"""The LoRA adapters of an instance: which ones requests may choose now, and which ones serve no more and still have
requests. Pure; step thread only.

Each adapter that is loaded gets a number (`Admit.adapter`), from 1 on, and no other one ever gets that. So what runs
keeps its own over every change. An adapter that was unloaded, or replaced by other content under its name, *leaves*: it
stays in memory until no request here has its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chitu.engine.weights_loader import AdapterFolder
from chitu.protocol.weights import ServedAdapter


class LoadedAdapter(NamedTuple):
    number: int
    hash: str


class AdapterTable:
    def __init__(self, started_with: Sequence[tuple[str, str]] = ()) -> None:
        """`started_with`: `ExecutorInfo.adapters`."""
        self._serving = {name: LoadedAdapter(number, found) for number, (name, found) in enumerate(started_with, 1)}
        self._leaving: dict[int, str] = {}
        """Names by number."""
        self._last = len(self._serving)
        """Largest number that was given."""

    @property
    def names(self) -> list[str]:
        """Names that requests may choose."""
        return list(self._serving)

    @property
    def is_leaving(self) -> bool:
        return bool(self._leaving)

    @property
    def has_any(self) -> bool:
        """Whether a request may have one."""
        return bool(self._serving or self._leaving)

    def find(self, name: str) -> LoadedAdapter | None:
        return self._serving.get(name)

    def to_read(self, wanted: Sequence[ServedAdapter] | None) -> list[AdapterFolder]:
        """Return those of the list that are not loaded, or whose content is to be found out, each with a new number."""
        found = []
        for each in wanted or ():
            loaded = self._serving.get(each.name)
            if loaded is None or loaded.hash != each.hash:
                self._last += 1
                found.append(AdapterFolder(self._last, each.name, each.path))
        return found

    def change(self, wanted: Sequence[ServedAdapter] | None, read: Mapping[str, int]) -> list[int]:
        """Serve this list from now on; None changes nothing. `read`: numbers of those that were read. Return numbers
        that nothing needs: what was read and is loaded already."""
        if wanted is None:
            return list(read.values())
        before, self._serving, surplus = self._serving, {}, list[int]()
        for each in wanted:
            loaded, number = before.get(each.name), read.get(each.name)
            if loaded is not None and loaded.hash == each.hash:
                self._serving[each.name] = loaded
                surplus += [] if number is None else [number]
            else:
                assert number is not None  # `to_read` named it
                self._serving[each.name] = LoadedAdapter(number, each.hash)
        kept = {each.number for each in self._serving.values()}
        self._leaving |= {each.number: name for name, each in before.items() if each.number not in kept}
        return surplus

    def take_unused(self, num_requests: Mapping[int, int]) -> list[int]:
        """Return the numbers of those that leave and that no request has any more: they are gone. `num_requests`: by
        number."""
        unused = [number for number in self._leaving if not num_requests.get(number)]
        for number in unused:
            del self._leaving[number]
        return unused

    def leaving(self, num_requests: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
        """Return the names of those that leave, each with how many requests have it."""
        return tuple([(name, num_requests.get(number, 0)) for number, name in sorted(self._leaving.items())])
