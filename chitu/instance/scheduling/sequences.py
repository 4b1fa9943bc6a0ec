"""Every request of an instance, in the queue of its state. The one writer of a state.

Owned by `PDScheduler`, step thread only; its managers decide what happens, and `take` it. Invariants: a request is in
one queue, that of its state; a pair that `SEQUENCE_TRANSITIONS` does not have changes nothing, so a request ends once,
and is freed once.
"""

from __future__ import annotations

from collections.abc import Mapping

from chitu.instance.scheduling.resources import Resources
from chitu.instance.scheduling.sequence import Sequence
from chitu.protocol.sequence_states import OPEN_STATES, SEQUENCE_TRANSITIONS, SequenceEvent, SequenceState


class Sequences:
    """`resources`: what they hold."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._all: dict[bytes, Sequence] = {}
        self._queues: dict[SequenceState, dict[bytes, Sequence]] = {state: {} for state in SequenceState}
        self.dropped_keys: list[int] = []
        """Of saved copies that nobody comes back to; the next plan drops them."""

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, room: bytes) -> bool:
        """Also where it is over, but a peer may still touch its pages."""
        return room in self._all

    def get(self, room: bytes) -> Sequence | None:
        return self._all.get(room)

    def find(self, room: bytes) -> Sequence | None:
        """One that is not over for the client."""
        sequence = self._all.get(room)
        return sequence if sequence is not None and sequence.state in OPEN_STATES else None

    def queue(self, *states: SequenceState) -> list[Sequence]:
        """In the order in which they came into these states, one state after the other. A copy."""
        return [sequence for state in states for sequence in self._queues[state].values()]

    def of(self, state: SequenceState) -> Mapping[bytes, Sequence]:
        """By room, as it is now."""
        return self._queues[state]

    @property
    def open(self) -> list[Sequence]:
        """Every request that is not over for its client; of a prompt with forks these."""
        return [s for s in self._all.values() if s.state in OPEN_STATES and not s.forks]

    def num_choices(self, *states: SequenceState) -> int:
        """Requests in these states, forks counted one by one."""
        return sum(len(sequence.forks) or 1 for state in states for sequence in self._queues[state].values())

    # ------------------------------------------------------------------------------------------------------- its road

    def add(self, sequence: Sequence) -> None:
        """It waits, and its forks wait for it."""
        for each in (sequence, *sequence.forks):
            each.state = SequenceState.WAITING if each is sequence else SequenceState.FORK_WAITING
            self._all[each.room] = self._queues[each.state][each.room] = each

    def take(self, sequence: Sequence, event: SequenceEvent) -> bool:
        """The one way in which a request changes. False: the event is absorbed."""
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
        """Its forks hold what they need, as their prompt does."""
        self.resources.hold_forks(source)
        for fork in source.forks:
            self.take(fork, SequenceEvent.HOLD)

    def close(self, sequence: Sequence) -> bool:
        """Over for the client: it computes no more. False: it was over."""
        is_retracted = sequence.state is SequenceState.RETRACTED
        if not self.take(sequence, SequenceEvent.END):
            return False
        sequence.stop_load()
        if is_retracted:
            self.dropped_keys.append(sequence.offload_key)
        self.resources.free_slot(sequence)
        return True

    def free(self, sequence: Sequence) -> None:
        """No peer touches its pages: all that it holds is given back."""
        if self.take(sequence, SequenceEvent.FREE):
            self.resources.free_all(sequence, lambda: self._remove(sequence))

    def _remove(self, sequence: Sequence) -> None:
        del self._all[sequence.room], self._queues[sequence.state][sequence.room]
