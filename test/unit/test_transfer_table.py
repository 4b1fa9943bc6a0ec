"""The table of rooms: one writer, absorbing ends, tombstones; and the queue in front of the transfer threads."""

from __future__ import annotations

import threading

from chitu.kv_transfer.transfer_queue import TransferJob, TransferKVChunk, TransferQueue
from chitu.kv_transfer.transfer_table import NEVER_S, Tombstone, TransferTable
from chitu.protocol.states import (
    RECEIVER_AWAITS,
    RECEIVER_DEADLINES,
    RECEIVER_TRANSITIONS,
    Deadline,
    ReceiverEvent,
    ReceiverState,
)
from chitu.testing.clock import FakeClock

ROOM, OTHER = b"r" * 16, b"o" * 16
LIMITS_S = {Deadline.BOOTSTRAP: 5.0, Deadline.TRANSFER: 7.0}


def make_table(max_tombstones: int = 10) -> TransferTable[ReceiverState, ReceiverEvent, str]:
    return TransferTable(RECEIVER_TRANSITIONS, RECEIVER_DEADLINES, LIMITS_S, max_tombstones)


def test_an_event_moves_a_room_and_one_without_a_transition_is_absorbed() -> None:
    table = make_table()
    assert table.apply(ROOM, ReceiverEvent.SENT, 0.0, "x") is None
    created = table.apply(ROOM, ReceiverEvent.ANNOUNCE, 0.0, "x")
    assert created is not None and created[0] is None and created[1].data == "x"
    assert table.apply(ROOM, ReceiverEvent.ANNOUNCE, 0.0, "y") is None
    assert table.apply(ROOM, ReceiverEvent.SUCCESS, 0.0) is None
    assert table.get(ROOM) is created[1] and created[1].state is ReceiverState.BOOTSTRAPPING


def test_a_room_that_ended_is_never_created_again_until_its_tombstone_is_pushed_out() -> None:
    table = make_table(max_tombstones=1)
    table.apply(ROOM, ReceiverEvent.ANNOUNCE, 0.0, "x")
    table.bury(ROOM, Tombstone("cancelled", "why"))
    assert table.apply(ROOM, ReceiverEvent.ANNOUNCE, 0.0, "y") is None
    assert table.tombstone(ROOM) == Tombstone("cancelled", "why")
    table.bury(OTHER, Tombstone("", ""))
    assert table.tombstone(ROOM) is None
    assert table.apply(ROOM, ReceiverEvent.ANNOUNCE, 0.0, "y") is not None


def test_each_state_sets_its_deadline_and_one_that_shares_it_lets_it_run_on() -> None:
    clock = FakeClock(100.0)
    table: TransferTable[ReceiverState, ReceiverEvent, str] = TransferTable(
        RECEIVER_TRANSITIONS, RECEIVER_DEADLINES, LIMITS_S
    )
    applied = table.apply(ROOM, ReceiverEvent.ANNOUNCE, clock.monotonic(), "x")
    assert applied is not None
    entry = applied[1]
    assert table.expired(104.9) == [] and table.expired(105.0) == [ROOM]
    clock.advance(4.0)
    table.apply(ROOM, ReceiverEvent.SENT, clock.monotonic())
    assert table.expired(110.9) == [] and table.expired(111.0) == [ROOM]
    clock.advance(4.5)
    table.apply(ROOM, ReceiverEvent.ROW_SENT, clock.monotonic())
    table.apply(ROOM, ReceiverEvent.LOGITS, clock.monotonic())
    assert entry.since_s == 108.5 and table.expired(111.0) == [ROOM], "logits do not buy time for the rest"
    clock.advance(2.5)
    text = table.overdue_text(entry, "D1", "P0", RECEIVER_AWAITS, clock.monotonic())
    assert text == "D1 waited 2.5 s in LOGITS for P0's last KV (7.0 s since the announcement)"
    table.apply(ROOM, ReceiverEvent.DEADLINE, clock.monotonic())
    assert entry.state is ReceiverState.QUARANTINED
    assert entry.deadline_s == NEVER_S and table.expired(1e9) == []


def chunk(layer: int, pages: int = 2) -> TransferKVChunk:
    return TransferKVChunk(layer, layer + 1, 0, pages)


def test_aux_rows_leave_first_then_rooms_in_order_with_waiting_layers_as_one_batch() -> None:
    done: list[TransferJob] = []
    queue = TransferQueue(done.append, max_batch_units=100)
    queue.put_chunk(ROOM, chunk(0))
    queue.put_chunk(OTHER, chunk(0))
    queue.put_chunk(ROOM, chunk(1))
    queue.put_aux(OTHER)
    while queue.run_one():
        pass
    assert done == [
        TransferJob(OTHER, True, ()),
        TransferJob(ROOM, False, (chunk(0), chunk(1))),
        TransferJob(OTHER, False, (chunk(0),)),
    ]


def test_a_batch_is_bounded_and_a_single_larger_chunk_still_leaves() -> None:
    done: list[TransferJob] = []
    queue = TransferQueue(done.append, max_batch_units=4)
    for layer in range(3):
        queue.put_chunk(ROOM, chunk(layer))
    queue.put_chunk(ROOM, chunk(3, pages=9))
    while queue.run_one():
        pass
    assert [len(batch.chunks) for batch in done] == [2, 1, 1]


def test_dropped_work_is_gone_and_drop_tells_whether_a_thread_holds_the_room() -> None:
    held: list[bool] = []
    queue = TransferQueue(lambda batch: held.append(queue.drop(batch.room)), max_batch_units=1)
    queue.put_chunk(ROOM, chunk(0))
    queue.put_chunk(ROOM, chunk(1))
    assert queue.run_one()
    assert held == [True]
    assert not queue.run_one() and len(queue) == 0
    assert queue.drop(ROOM) is False


def test_no_two_threads_ever_hold_the_same_room_and_its_chunks_keep_their_order() -> None:
    lock, inside, seen = threading.Lock(), set(), []
    finished = threading.Event()

    def work(batch: TransferJob) -> None:
        with lock:
            assert batch.room not in inside
            inside.add(batch.room)
        with lock:
            inside.discard(batch.room)
            seen.extend((batch.room, c.first_layer) for c in batch.chunks)
            if len(seen) == 400:
                finished.set()

    queue = TransferQueue(work, max_batch_units=1)
    queue.start(3, lambda name, target: threading.Thread(name=name, target=target, daemon=True))
    for layer in range(200):
        queue.put_chunk(ROOM, chunk(layer))
        queue.put_chunk(OTHER, chunk(layer))
    assert finished.wait(20)
    queue.close()
    for room in (ROOM, OTHER):
        assert [layer for who, layer in seen if who == room] == list(range(200))
