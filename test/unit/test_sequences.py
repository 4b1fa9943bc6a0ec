"""The states of a request on its instance, checked as a graph; and its queue is always that of its state."""

from __future__ import annotations

import pytest
from scheduler_world import make_aux

from chitu.cache_manager import PagedKVCacheManager
from chitu.instance.sequences import AT_PEER_STATES, OPEN_STATES, SEQUENCE_TRANSITIONS, Resources, Sequence, Sequences
from chitu.instance.sequences import SequenceEvent as E
from chitu.instance.sequences import SequenceState as S
from chitu.protocol import SamplingParams, pack_i32

ROADS: dict[S, tuple[E, ...]] = {
    S.WAITING: (),
    S.COMPUTING: (E.ADMIT,),
    S.INFLIGHT: (E.ADMIT, E.COMPUTED),
    S.TRANSFER: (E.ANNOUNCE,),
    S.LOGITS: (E.ANNOUNCE, E.ROW_HERE),
    S.STARTED: (E.ANNOUNCE, E.ROW_HERE, E.START),
    S.LANDED: (E.ANNOUNCE, E.ROW_HERE, E.KV_HERE),
    S.RUNNING: (E.ANNOUNCE, E.ROW_HERE, E.START, E.KV_HERE),
    S.RETRACTED: (E.ADMIT, E.START, E.RETRACT),
    S.FORK_WAITING: (),
    S.FORK_HELD: (E.HOLD,),
    S.CLOSING: (E.ANNOUNCE, E.END),
    S.LEAVING: (E.ANNOUNCE, E.END, E.FREE),
}


def one(number: int, forks: int = 0) -> Sequence:
    room = number.to_bytes(16, "big")
    sequence = Sequence(room, f"r{number}", number, 0.0, pack_i32(range(6)), SamplingParams(4))
    sequence.forks = [one(number * 100 + fork) for fork in range(1, forks + 1)]
    for fork in sequence.forks:
        fork.source = sequence
    return sequence


def in_state(state: S) -> tuple[Sequences, Sequence]:
    sequences = Sequences(Resources(PagedKVCacheManager(8, 4), 4, make_aux(0)))
    is_fork = state in (S.FORK_WAITING, S.FORK_HELD)
    first = one(1, forks=int(is_fork))
    sequences.add(first)
    sequence = first.forks[0] if is_fork else first
    for event in ROADS[state]:
        assert sequences.take(sequence, event)
    assert sequence.state is state
    return sequences, sequence


@pytest.mark.parametrize("event", E, ids=lambda event: event.name)
@pytest.mark.parametrize("state", S, ids=lambda state: state.name)
def test_every_event_in_every_state_is_a_pair_of_the_table_or_absorbed(state: S, event: E) -> None:
    sequences, sequence = in_state(state)
    target = SEQUENCE_TRANSITIONS.get((state, event))
    assert sequences.take(sequence, event) is (target is not None)
    assert sequence.state is (target or state)
    for each in S:
        assert (sequence.room in sequences.of(each)) == (each is sequence.state)
    assert sequences.get(sequence.room) is sequence
    assert (sequences.find(sequence.room) is sequence) == (sequence.state in OPEN_STATES)


def test_a_request_ends_once_from_every_state_and_is_freed_once() -> None:
    after_end = {target for (_, event), target in SEQUENCE_TRANSITIONS.items() if event is E.END}
    assert after_end == {S.CLOSING} and {s for s, event in SEQUENCE_TRANSITIONS if event is E.END} == OPEN_STATES
    assert [pair for pair in SEQUENCE_TRANSITIONS if pair[0] is S.CLOSING] == [(S.CLOSING, E.FREE)]
    assert not [pair for pair in SEQUENCE_TRANSITIONS if pair[0] is S.LEAVING]


def test_p_may_write_from_the_announcement_until_its_kv_is_here() -> None:
    entered = {target for (_, event), target in SEQUENCE_TRANSITIONS.items() if event is E.ANNOUNCE}
    border = entered
    while border:
        border = {
            target
            for (state, event), target in SEQUENCE_TRANSITIONS.items()
            if state in border and event not in (E.KV_HERE, E.END)
        } - entered
        entered |= border
    assert entered == AT_PEER_STATES


@pytest.mark.parametrize("state", [s for s in S if s in OPEN_STATES], ids=lambda state: state.name)
def test_what_is_closed_and_freed_is_gone_and_holds_nothing(state: S) -> None:
    sequences, sequence = in_state(state)
    sequences.resources.slots.take(sequence)
    sequences.resources.cache.reserve(sequence.room, 6)
    assert sequences.close(sequence) and not sequences.close(sequence)
    assert sequences.resources.slots.num_free == 4
    assert sequences.take_dropped_keys() == ([sequence.offload_key] if state is S.RETRACTED else [])
    sequences.free(sequence)
    sequences.free(sequence)
    assert sequence.room not in sequences and sequences.resources.cache.allocator.num_free == 8
    assert not any(sequence.room in sequences.of(each) for each in S)


def test_while_a_step_is_unread_what_is_freed_is_still_here() -> None:
    sequences, sequence = in_state(S.RUNNING)
    sequences.resources.launched()
    sequences.close(sequence)
    sequences.free(sequence)
    assert sequence.state is S.LEAVING and sequence.room in sequences and not sequences.open
    sequences.resources.read()
    assert sequence.room not in sequences and not len(sequences)


def test_forks_are_counted_one_by_one_and_a_prompt_with_forks_is_not_open_itself() -> None:
    sequences = Sequences(Resources(PagedKVCacheManager(8, 4), 4, make_aux(0)))
    source = one(1, forks=3)
    sequences.add(source)
    sequences.add(one(2))
    assert sequences.num_choices(S.WAITING) == 4
    assert sequences.open == [*source.forks, *sequences.queue(S.WAITING)[1:]]
