"""Every request of an instance, in the queue of its state. The only writer of a state.

Owned by `PDScheduler`, step thread only; its managers decide on events and apply them by `take`. Invariants: a request
is in exactly one queue, that of its state. A pair that is not in `SEQUENCE_TRANSITIONS` changes nothing, so a request
ends once, and is freed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from chitu.instance.scheduling.resources import Resources
from chitu.instance.scheduling.sequence import Sequence
from chitu.protocol.sequence_states import OPEN_STATES, SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState


class Sequences:
    """The sequences of an instance by state. `resources` are what they hold; `on_gone` gets the room of each sequence
    that leaves."""

    def __init__(self, resources: Resources, on_gone: Callable[[bytes], None] = lambda room: None) -> None:
        self.resources = resources
        self._on_gone = on_gone
        self._all: dict[bytes, Sequence] = {}
        self._queues: dict[SequenceState, dict[bytes, Sequence]] = {state: {} for state in SequenceState}
        self.dropped_keys: list[int] = []
        """Keys of saved copies that no request needs any longer; the next plan drops them."""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, room: bytes) -> bool:
        """Return whether the room is here, even if it is over and a peer may still touch its pages."""
        return room in self._all

    def get(self, room: bytes) -> Sequence | None:
        return self._all.get(room)

    def find(self, room: bytes) -> Sequence | None:
        """Return the room's sequence unless it is over for the client."""
        sequence = self._all.get(room)
        return sequence if sequence is not None and sequence.state in OPEN_STATES else None

    def queue(self, *states: SequenceState) -> list[Sequence]:
        """Return a copy of these queues, one state after the other, each in the order of entry."""
        return [sequence for state in states for sequence in self._queues[state].values()]

    def of(self, state: SequenceState) -> Mapping[bytes, Sequence]:
        """Return the live queue of a state, by room."""
        return self._queues[state]

    @property
    def open(self) -> list[Sequence]:
        """Every request that is not over for its client; for a prompt with forks, its forks."""
        return [s for s in self._all.values() if s.state in OPEN_STATES and not s.forks]

    def num_choices(self, *states: SequenceState) -> int:
        """Return the number of requests in these states, with forks counted one by one."""
        return sum(len(sequence.forks) or 1 for state in states for sequence in self._queues[state].values())

    # ---------------------------------------------------------------------------------------------------- transitions

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence as WAITING, with forks that wait for it."""
        for each in (sequence, *sequence.forks):
            each.state = SequenceState.WAITING if each is sequence else SequenceState.FORK_WAITING
            self._all[each.room] = self._queues[each.state][each.room] = each

    def take(self, sequence: Sequence, event: SequenceEvent) -> bool:
        """Apply an event: the only way in which a state changes. Return False if the event is absorbed."""
        target = SEQUENCE_TRANSITIONS.get((sequence.state, event))
        if target is None:
            return False
        del self._queues[sequence.state][sequence.room]
        sequence.state = target
        self._queues[target][sequence.room] = sequence
        return True

    def take_dropped_keys(self) -> list[int]:
        keys, self.dropped_keys = self.dropped_keys, []
        return keys

    def hold_forks(self, source: Sequence) -> None:
        """Reserve what the forks of a prompt need, and mark them as held."""
        self.resources.hold_forks(source)
        for fork in source.forks:
            self.take(fork, SequenceEvent.HOLD)

    def close(self, sequence: Sequence) -> bool:
        """End a sequence for the client: it computes no more. Return False if it was over already."""
        is_retracted = sequence.state is SequenceState.RETRACTED
        if not self.take(sequence, SequenceEvent.END):
            return False
        sequence.stop_load()
        if is_retracted:
            self.dropped_keys.append(sequence.offload_key)
        self.resources.free_slot(sequence)
        return True

    def free(self, sequence: Sequence) -> None:
        """Free all that a closed sequence holds. The caller knows that no peer touches its pages."""
        if self.take(sequence, SequenceEvent.FREE):
            self.resources.when_read(partial(self._remove, sequence))

    def _remove(self, sequence: Sequence) -> None:
        self.resources.free_now(sequence)
        del self._all[sequence.room], self._queues[sequence.state][sequence.room]
        self._on_gone(sequence.room)
