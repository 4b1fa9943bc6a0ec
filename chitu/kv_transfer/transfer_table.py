"""Room -> state, for either role. `apply(room, event)` is the only writer; the tables of `protocol/states.py` decide.

Owned by `PrefillSender` or `DecodeReceiver`, which call it under their lock from the step, comm and transfer threads.
Invariants: an event that the state has no transition for changes nothing (so terminal states absorb late frames); no
state is entered without its deadline, which runs on if the state before had the same one; a room that ended leaves a
tombstone, and only `apply` on a room without one can create an entry. Tombstones are bounded: the oldest is evicted
first, long after the last frame of its room could arrive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from chitu.protocol.states import Deadline, waited_text

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
T = TypeVar("T")

MAX_TOMBSTONES = 100_000
NEVER_S = float("inf")


@dataclass(slots=True)
class Entry(Generic[S, T]):
    """A live room. `data` is the owner's record; only `TransferTable.apply` writes the state."""

    state: S
    data: T
    since_s: float
    """Time (monotonic seconds) at which the room entered this state."""
    deadline: Deadline | None
    deadline_since_s: float
    """Time from which its deadline runs."""
    deadline_s: float
    """Time at which the owner applies its DEADLINE event."""


@dataclass(slots=True, frozen=True)
class Tombstone:
    """What is remembered of a room that ended."""

    code: str
    """Error code; empty if the room succeeded."""
    message: str


@dataclass(slots=True)
class TransferTable(Generic[S, E, T]):
    transitions: Mapping[tuple[S | None, E], S]
    deadlines: Mapping[S, Deadline]
    limits_s: Mapping[Deadline, float]
    """Length of every deadline in `deadlines` that a clock ends."""
    max_tombstones: int = MAX_TOMBSTONES
    _entries: dict[bytes, Entry[S, T]] = field(default_factory=dict)
    _tombstones: OrderedDict[bytes, Tombstone] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, room: bytes) -> Entry[S, T] | None:
        return self._entries.get(room)

    def tombstone(self, room: bytes) -> Tombstone | None:
        return self._tombstones.get(room)

    def items(self) -> Iterator[tuple[bytes, Entry[S, T]]]:
        """Return a snapshot, so that the caller may apply events while it iterates."""
        return iter(list(self._entries.items()))

    def apply(self, room: bytes, event: E, now_s: float, new: T | None = None) -> tuple[S | None, Entry[S, T]] | None:
        """Apply one event. Return the state before it and the room; None if it is absorbed. `new` is the record of a
        room that this event may create."""
        entry = self._entries.get(room)
        before = entry.state if entry is not None else None
        target = self.transitions.get((before, event))
        if target is None:
            return None
        if entry is None:
            if new is None or room in self._tombstones:
                return None
            entry = self._entries[room] = Entry(target, new, NEVER_S, None, NEVER_S, NEVER_S)
        entry.state, entry.since_s = target, now_s
        deadline = self.deadlines[target]
        if deadline is not entry.deadline:
            entry.deadline, entry.deadline_since_s = deadline, now_s
            entry.deadline_s = now_s + self.limits_s.get(deadline, NEVER_S)
        return before, entry

    def overdue_text(self, entry: Entry[S, T], who: str, peer: str, awaits: Mapping[S, str], now_s: float) -> str:
        """Return why a room whose deadline passed ends: state, peer, seconds. `awaits`: what is missing, by state."""
        text = waited_text(who, now_s - entry.since_s, entry.state, awaits[entry.state].format(peer=peer))
        if entry.deadline_since_s == entry.since_s:
            return text
        return f"{text} ({now_s - entry.deadline_since_s:.1f} s since the announcement)"

    def bury(self, room: bytes, tombstone: Tombstone) -> None:
        """Drop the entry (if any) and remember the room, so that no late frame brings it back."""
        self._entries.pop(room, None)
        self._tombstones[room] = tombstone
        self._tombstones.move_to_end(room)
        while len(self._tombstones) > self.max_tombstones:
            self._tombstones.popitem(last=False)

    def expired(self, now_s: float) -> list[bytes]:
        """Return the rooms whose deadline has passed."""
        return [room for room, entry in self._entries.items() if entry.deadline_s <= now_s]
