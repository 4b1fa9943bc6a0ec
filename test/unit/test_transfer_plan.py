"""Page lists become the fewest copies, and nothing out of range becomes an address."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import FakeClock

from chitu.errors import BadFrame, IncompatibleLayout, Integrity, TransferFailed
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes
from chitu.kv_transfer.bootstrap import MAX_BODY_BYTES, MAX_GUESTS, BootstrapServer
from chitu.kv_transfer.both_sides import NEVER_S, Deadline, Tombstone, TransferTable
from chitu.kv_transfer.chunks import TransferJob, TransferKVChunk, TransferQueue
from chitu.kv_transfer.layout import MetadataBuffers, check_compatible, check_rank_memory, rank_memory
from chitu.kv_transfer.receiver import (
    RECEIVER_AWAITS,
    RECEIVER_DEADLINES,
    RECEIVER_TRANSITIONS,
    ReceiverEvent,
    ReceiverState,
)
from chitu.kv_transfer.shard_writer import join, pair_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.mapped import require_inside
from chitu.kv_transfer.transports.transport import CopyList, WriteError, batch_bytes_of
from chitu.net.curve import derive
from chitu.protocol import ClusterView, GroupPlace, InstanceInfo, KVLayout, RankMemory, RouteEntry, TransportSession
from chitu.types import Role, new_room

LAYOUT = KVLayout.uniform("m", num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype="float32", vocab_size=100)


@dataclasses.dataclass
class Memory:
    """A made-up pool: regions one after the other, then aux rows, then state rows."""

    arena_base: int
    num_pages: int = 40
    num_layers: int = 2
    bytes_each: int = 256
    aux_row_bytes: int = 128
    num_aux_slots: int = 3
    state_row_bytes: int = 0
    num_state_slots: int = 0

    @property
    def region_bases(self) -> tuple[int, ...]:
        return tuple(self.arena_base + r * self.num_pages * self.bytes_each for r in range(2 * self.num_layers))

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return (self.bytes_each,) * (2 * self.num_layers)

    @property
    def aux_base(self) -> int:
        return self.arena_base + 2 * self.num_layers * self.num_pages * self.bytes_each

    @property
    def state_base(self) -> int:
        return self.aux_base + self.num_aux_slots * self.aux_row_bytes

    @property
    def arena_bytes(self) -> int:
        return self.state_base + self.num_state_slots * self.state_row_bytes - self.arena_base


SRC, DST = Memory(1 << 20), Memory(1 << 30, num_pages=60)


def bytes_of(copies: CopyList) -> list[tuple[int, int]]:
    """Return (source, destination) of every 256 byte page that the list moves, in order."""
    pairs = []
    for src, dst, length in zip(copies.src, copies.dst, copies.length, strict=True):
        assert length % 256 == 0 and length > 0
        pairs += [(src + offset, dst + offset) for offset in range(0, length, 256)]
    return pairs


def check_inside(copies: CopyList, src: Memory, dst: Memory) -> None:
    """Check the copies as each transport does before it writes."""
    columns = tuple(np.asarray(column, dtype=np.int64) for column in copies)
    require_inside("x", columns, (dst.arena_base, dst.arena_bytes), [(src.arena_base, src.arena_bytes)])  # type: ignore[arg-type]


page_lists = st.integers(0, 40).flatmap(
    lambda n: st.tuples(
        st.permutations(range(40)).map(lambda pages: pages[:n]), st.permutations(range(60)).map(lambda pages: pages[:n])
    )
)
sorted_page_lists = page_lists.map(lambda lists: (sorted(lists[0]), sorted(lists[1])))


@given(st.one_of(page_lists, sorted_page_lists), st.integers(0, 2), st.integers(0, 2))
def test_every_page_of_every_region_moves_once_in_the_fewest_copies(
    lists: tuple[list[int], list[int]], first: int, count: int
) -> None:
    src_pages, dst_pages = lists
    layers = range(first, min(2, first + count))
    copies = plan_page_copies(pair_regions(SRC, DST), src_pages, dst_pages, LAYOUT.regions_of(layers))
    expected = [
        (SRC.region_bases[r] + s * 256, DST.region_bases[r] + d * 256)
        for r in range(2 * layers.start, 2 * layers.stop)
        for s, d in zip(src_pages, dst_pages, strict=True)
    ]
    assert bytes_of(copies) == expected
    check_inside(copies, SRC, DST)
    per_region = len(copies.src) // max(1, len(LAYOUT.regions_of(layers)))
    breaks = sum(
        src_pages[i] != src_pages[i - 1] + 1 or dst_pages[i] != dst_pages[i - 1] + 1 for i in range(1, len(src_pages))
    )
    assert per_region == (breaks + 1 if src_pages and layers else 0)
    assert copies.nbytes == len(expected) * 256


def test_runs_break_where_either_side_breaks() -> None:
    copies = plan_page_copies(pair_regions(SRC, DST), [0, 1, 2, 3, 10], [5, 6, 7, 20, 21], range(2))
    assert list(copies.length) == [3 * 256, 256, 256] * 2
    assert list(copies.src)[:3] == [SRC.arena_base, SRC.arena_base + 3 * 256, SRC.arena_base + 10 * 256]


@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "error", "words"),
    [
        ([40], [0], TransferFailed, "source page 40 of 40"),
        ([-1], [0], TransferFailed, "source page -1 of 40"),
        ([0], [60], BadFrame, "destination page 60 of 60"),
        ([0], [-7], BadFrame, "destination page -7 of 60"),
        ([0], [1 << 70], BadFrame, "no page indices"),
        ([0, 1], [3], BadFrame, "2 source pages for 1 destination"),
        ([0, 1], [3, 3], BadFrame, "destination page 3 is listed twice"),
        ([2, 2], [3, 4], TransferFailed, "source page 2 is listed twice"),
    ],
)
def test_a_page_out_of_range_is_refused_with_its_value(
    src_pages: list[int], dst_pages: list[int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_page_copies(pair_regions(SRC, DST), src_pages, dst_pages, range(4))


def test_layers_and_page_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TransferFailed, match="regions 2 to 5 of 4"):
        plan_page_copies(pair_regions(SRC, DST), [0], [0], range(2, 6))
    with pytest.raises(TransferFailed, match=r"256.* bytes here and .*512"):
        pair_regions(SRC, Memory(1 << 30, bytes_each=512))


def test_aux_rows_are_one_copy_and_range_checked() -> None:
    copies = plan_aux_copy(SRC, DST, 2, 1)
    assert copies == CopyList((SRC.aux_base + 256,), (DST.aux_base + 128,), (128,))
    check_inside(copies, SRC, DST)
    with pytest.raises(TransferFailed, match="source aux slot 3 of 3"):
        plan_aux_copy(SRC, DST, 3, 0)
    with pytest.raises(BadFrame, match="destination aux slot -1 of 3"):
        plan_aux_copy(SRC, DST, 0, -1)


def test_joined_lists_keep_order() -> None:
    pages = plan_page_copies(pair_regions(SRC, DST), [1], [2], range(2))
    joined = join(pages, plan_aux_copy(SRC, DST, 0, 0))
    assert list(joined.src) == [*pages.src, SRC.aux_base] and joined.nbytes == 2 * 256 + 128


@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_that_leaves_an_arena_is_found(side: str, offset: int) -> None:
    src, dst = [SRC.arena_base, SRC.arena_base], [DST.arena_base, DST.arena_base]
    addresses, memory = (src, SRC) if side == "source" else (dst, DST)
    addresses[1] = memory.arena_base - 1 if offset < 0 else memory.arena_base + memory.arena_bytes - 7
    with pytest.raises(WriteError, match="copy 1 .*peer's arena" if side == "destination" else "a source lies outside"):
        check_inside(CopyList(src, dst, [8, 8]), SRC, DST)
    addresses[1] -= offset
    check_inside(CopyList(src, dst, [8, 8]), SRC, DST)


def test_pages_of_a_long_prompt_that_do_not_touch_are_a_piece_each_in_every_region() -> None:
    src, dst = Memory(1 << 30, 1000, 32, 16384), Memory(1 << 40, 1000, 32, 16384)
    src_pages, dst_pages = [7 * i % 1000 for i in range(100)], [11 * i % 1000 for i in range(100)]
    copies = plan_page_copies(pair_regions(src, dst), src_pages, dst_pages, range(64))
    check_inside(copies, src, dst)
    assert len(copies.src) == 6400 and copies.nbytes == 6400 * 16384


def received(**changes: object) -> RankMemory:
    memory = rank_memory(DST, 0, [TransportSession("fake", "d")])
    return msgspec.structs.replace(memory, **changes)


def test_a_sound_registration_passes_and_survives_the_wire() -> None:
    memory = received()
    check_rank_memory(memory, SRC)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=RankMemory) == memory
    assert memory.sessions[0].session_id == "d" and memory.region_bases == DST.region_bases


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arena_base": -1}, "arena_base is -1"),
        ({"arena_bytes": 1 << 63}, "arena_bytes is"),
        ({"arena_base": (1 << 63) - 10}, "ends beyond"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"num_pages": 61}, "overlaps"),
        ({"num_aux_slots": 4}, "aux rows .* outside the arena"),
        ({"num_pages": 1 << 62}, "outside the arena"),
        ({"page_bytes": (128,) * 4}, "page_bytes is 128 there and 256 here"),
        ({"aux_row_bytes": 64}, "aux_row_bytes is 64"),
        ({"region_bases": DST.region_bases[:3]}, "3 regions there and 4 here"),
        ({"page_bytes": DST.page_bytes[:3]}, r"page_bytes is 256 there and 256 here, of 3 and 4 regions"),
        ({"region_bases": (*DST.region_bases[:3], DST.arena_base - 256)}, "region 3 .* outside"),
        ({"region_bases": (*DST.region_bases[:3], DST.region_bases[0])}, "overlaps"),
        ({"aux_base": DST.arena_base}, "overlaps"),
        ({"tp_rank": 1}, "tp_rank is 1 with tp_size 1"),
        ({"tp_rank": -1}, "tp_rank is -1"),
    ],
)
def test_a_registration_with_wrong_addresses_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BadFrame, match=words):
        check_rank_memory(received(**changes), SRC)


def test_layouts_that_differ_are_refused_with_both_printed() -> None:
    check_compatible(LAYOUT, msgspec.structs.replace(LAYOUT))
    other = msgspec.structs.replace(LAYOUT, page_size=32, dtype="bfloat16")
    with pytest.raises(IncompatibleLayout, match="page_size: 4 != 32; dtype: float32 != bfloat16") as caught:
        check_compatible(LAYOUT, other)
    assert str(LAYOUT) in caught.value.message and str(other) in caught.value.message


def test_a_latent_cache_has_one_region_a_layer():
    """It has four layers in the regions that would be K and V of two."""
    latent = KVLayout.uniform("m", 4, 1, 16, 4, "float32", 100, regions_per_layer=1)
    assert latent.regions_of(range(1, 3)) == range(1, 3)
    copies = plan_page_copies(pair_regions(SRC, DST), [7], [9], latent.regions_of(range(1, 3)))
    expected = [(SRC.region_bases[r] + 7 * 256, DST.region_bases[r] + 9 * 256) for r in (1, 2)]
    assert bytes_of(copies) == expected


def test_a_latent_cache_and_one_of_keys_and_values_do_not_fit_each_other():
    latent, other = (KVLayout.uniform("m", 2, 1, 8, 4, "float32", 100, regions_per_layer=n) for n in (1, 2))
    with pytest.raises(IncompatibleLayout, match="groups: layers 0 to 1: 1 x 8 != layers 0 to 1: 1 x 8 and 8"):
        check_compatible(latent, other)
    for tp_size in (1, 2, 3, 8):  # every rank holds the whole latent
        check_compatible(latent, msgspec.structs.replace(latent, tp_size=tp_size))


# ----------------------------------------------------------------------------------------------------------------------
# The table of rooms: one writer, absorbing ends, tombstones; and the queue in front of the transfer threads.


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


def test_each_state_begins_its_deadline_and_so_does_an_advance_within_it() -> None:
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
    table.advance(entry, clock.monotonic())
    assert table.expired(115.4) == [] and table.expired(115.5) == [ROOM]
    clock.advance(1.0)
    table.apply(ROOM, ReceiverEvent.ROW_SENT, clock.monotonic())
    table.apply(ROOM, ReceiverEvent.LOGITS, clock.monotonic())
    assert entry.since_s == 109.5 and table.expired(116.4) == [] and table.expired(116.5) == [ROOM]
    clock.advance(7.0)
    text = table.overdue_text(entry, "D1", "P0", RECEIVER_AWAITS, clock.monotonic())
    assert text == "D1 waited 7.0 s in LOGITS for P0's last KV"
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
        TransferJob(OTHER, is_aux=True),
        TransferJob(ROOM, chunks=[chunk(0), chunk(1)]),
        TransferJob(OTHER, chunks=[chunk(0)]),
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


# ----------------------------------------------------------------------------------------------------------------------
# Aux slots: counts, and rows that verify only if they are whole and belong to the room.


VOCAB = 10
ROW_BYTES = aux_row_bytes(VOCAB)


def new_buffers(num_slots: int = 3) -> MetadataBuffers:
    return MetadataBuffers(np.zeros((num_slots, ROW_BYTES), np.uint8), 4 * VOCAB)


def test_slots_are_counted_and_run_out() -> None:
    buffers = new_buffers()
    slots = [buffers.allocate() for _ in range(3)]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]
    assert (buffers.num_slots, buffers.num_free, buffers.allocate()) == (3, 0, None)
    buffers.free(1)
    assert (buffers.num_free, buffers.allocate()) == (1, 1)


def test_freeing_twice_or_a_slot_out_of_range_is_an_error() -> None:
    buffers = new_buffers()
    slot = buffers.allocate()
    assert slot is not None
    buffers.free(slot)
    with pytest.raises(ValueError, match="free already"):
        buffers.free(slot)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="aux slot"):
            buffers.free(wrong)
    assert buffers.num_free == 3


def test_a_sealed_row_verifies_after_it_was_copied_elsewhere() -> None:
    source_rows, target_rows = (np.zeros((3, ROW_BYTES), np.uint8) for _ in range(2))
    source, target, room = MetadataBuffers(source_rows, 4 * VOCAB), MetadataBuffers(target_rows, 4 * VOCAB), new_room()
    slot = source.allocate()
    assert slot is not None
    source.get(slot)[:] = np.arange(VOCAB)
    source.seal(slot, room)
    target_rows[2] = source_rows[slot]
    target.verify(2, room)
    np.testing.assert_array_equal(target.get(2), np.arange(VOCAB, dtype=np.float32))
    with pytest.raises(Integrity, match="belongs to room"):
        target.verify(2, new_room())


@pytest.mark.parametrize("byte", [0, 8, 16, 24, 40, 60, AUX_HEADER_BYTES, AUX_HEADER_BYTES + 4 * VOCAB - 1])
def test_any_changed_byte_that_matters_is_found(byte: int) -> None:
    rows, room = np.zeros((1, ROW_BYTES), np.uint8), new_room()
    buffers = MetadataBuffers(rows, 4 * VOCAB)
    buffers.seal(0, room)
    buffers.verify(0, room)
    rows[0, byte] ^= 0x40
    with pytest.raises(Integrity):
        buffers.verify(0, room)


def test_a_stale_row_never_verifies_once_its_slot_is_allocated_again() -> None:
    buffers, room = new_buffers(1), new_room()
    assert buffers.allocate() == 0
    buffers.seal(0, room)
    buffers.free(0)
    assert buffers.allocate() == 0
    with pytest.raises(Integrity, match="no row was written"):
        buffers.verify(0, room)


def test_the_header_is_as_documented() -> None:
    rows, room = np.zeros((1, ROW_BYTES), np.uint8), new_room()
    MetadataBuffers(rows, 4 * VOCAB).seal(0, room, 48)
    magic, version, length, row_room, _, cached_tokens = struct.unpack_from("<8sI4xQ16sq12xI", rows[0].tobytes())
    assert (magic, version, length, row_room, cached_tokens) == (b"chituAUX", 3, 4 * VOCAB, room, 48)
    assert not rows[0, 12:16].any() and not rows[0, 48:60].any()


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((3, ROW_BYTES), np.int8),
        np.zeros((3, 2 * ROW_BYTES), np.uint8)[:, ::2],
        np.zeros(ROW_BYTES, np.uint8),
        np.zeros((3, AUX_HEADER_BYTES), np.uint8),
    ],
)
def test_rows_of_a_wrong_kind_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(ValueError):
        MetadataBuffers(rows, 4 * VOCAB)


def test_every_flipped_bit_of_every_field_is_found_and_only_the_rest_is_free() -> None:
    """The fields are magic, version, length, room, checksum, cached tokens and the logits; what is left carries
    nothing."""
    rows, room = np.zeros((1, ROW_BYTES), np.uint8), new_room()
    buffers = MetadataBuffers(rows, 4 * VOCAB)
    buffers.get(0)[:] = np.random.default_rng(1).normal(size=VOCAB)
    buffers.seal(0, room, 1 << 20)
    fields = {*range(12), *range(16, 48), *range(60, AUX_HEADER_BYTES + 4 * VOCAB)}
    for byte in range(ROW_BYTES):
        for bit in range(8):
            rows[0, byte] ^= 1 << bit
            if byte in fields:
                with pytest.raises(Integrity):
                    buffers.verify(0, room)
            else:
                buffers.verify(0, room)
            rows[0, byte] ^= 1 << bit
    assert buffers.verify(0, room) == 1 << 20


def test_slots_that_are_used_again_and_again_never_pass_an_earlier_rooms_row_off_as_the_next_ones() -> None:
    """Tries whole rows of earlier rooms, their logits under a new header, and a new row that arrived in part."""
    source_rows, target_rows = (np.zeros((2, ROW_BYTES), np.uint8) for _ in range(2))
    source, target = MetadataBuffers(source_rows, 4 * VOCAB), MetadataBuffers(target_rows, 4 * VOCAB)
    earlier: list[tuple[bytes, np.ndarray]] = []
    for turn in range(7):  # uses both slots more than three times
        src, dst, room = source.allocate(), target.allocate(), new_room()
        assert src is not None and dst is not None
        for _, row in earlier:  # a late write, before the new row arrives
            target_rows[dst] = row
            with pytest.raises(Integrity, match="belongs to room"):
                target.verify(dst, room)
        source.get(src)[:] = np.arange(VOCAB) + turn
        source.seal(src, room)
        row = source_rows[src].copy()
        for _, old in earlier:
            target_rows[dst, :AUX_HEADER_BYTES] = row[:AUX_HEADER_BYTES]
            target_rows[dst, AUX_HEADER_BYTES:] = old[AUX_HEADER_BYTES:]
            with pytest.raises(Integrity, match="checksum"):
                target.verify(dst, room)
        target_rows[dst] = row
        target.verify(dst, room)
        earlier.append((room, row))
        source.free(src)
        target.free(dst)


# ----------------------------------------------------------------------------------------------------------------------
# The bootstrap directory: the P of the cluster view, over HTTP.


SERVED_LAYOUT = KVLayout.uniform("hash", 2, 2, 16, 16, "float32", 100, tp_size=2)


def member(role: Role, rank: int, incarnation: int = 1) -> InstanceInfo:
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 29620, 5000 + rank, SERVED_LAYOUT, 512)


NO_RANKS = ("7", "x", "", "-1", "1e3", "%ff", "9" * 5000, "2&engine_rank=z")
VIEW = ClusterView(7, 1, (member(Role.DECODE, 0), member(Role.PREFILL, 10), member(Role.PREFILL, 2, 9)))


def call(
    server: BootstrapServer, method: str, target: str, authorization: str = "", body: bytes = b""
) -> tuple[int, Any]:
    """Send one request through the ASGI application, its body in pieces; only that of a PUT may be read."""
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []

    pieces = [body[start : start + 1000] for start in range(0, max(1, len(body)), 1000)]

    async def receive() -> dict[str, Any]:
        assert method == "PUT", "a body is of no interest"
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", authorization.encode())] if authorization else []
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
    asyncio.run(server.app(scope, receive, send))
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])


def test_every_prefill_of_the_newest_view_is_listed_and_found_by_rank() -> None:
    views = [VIEW]
    server = BootstrapServer(lambda: views[-1])
    status, found = call(server, "GET", "/route?engine_rank=2")
    entry = RouteEntry(Role.PREFILL, 2, "127.0.0.1", 5002, 2, 9, SERVED_LAYOUT)
    assert status == 200 and msgspec.convert(found, RouteEntry) == entry
    status, listed = call(server, "GET", "/route")
    assert status == 200 and [item["engine_rank"] for item in listed] == [2, 10]
    views.append(msgspec.structs.replace(VIEW, instances=VIEW.instances[:2]))
    assert [item["engine_rank"] for item in call(server, "GET", "/route")[1]] == [10]
    assert call(server, "GET", "/route?engine_rank=2")[0] == 404
    assert call(server, "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("PUT", "/route", 400),
        ("PUT", "/health", 405),
        ("DELETE", "/route", 405),
        ("POST", "/health", 405),
        ("GET", "/elsewhere", 404),
        *(("GET", f"/route?engine_rank={rank}", 404) for rank in NO_RANKS),
    ],
)
def test_wrong_requests_get_their_status_and_a_message(method: str, target: str, status: int) -> None:
    found, answer = call(BootstrapServer(lambda: VIEW), method, target)
    assert found == status and 0 < len(answer["error"]["message"]) < 200


def test_only_health_is_open_where_the_cluster_has_a_key() -> None:
    secrets = derive("a key of the cluster")
    server = BootstrapServer(lambda: VIEW, secrets)
    assert call(server, "GET", "/health")[0] == 200
    for wrong in ("", "Bearer wrong", f"Basic {secrets.token}"):
        assert call(server, "GET", "/route", wrong)[0] == call(server, "PUT", "/route", wrong)[0] == 401
    assert len(call(server, "GET", "/route", f"Bearer {secrets.token}")[1]) == 2


MINIMAL = {"role": "Prefill", "rank_ip": "10.0.0.7", "rank_port": 5100, "engine_rank": 7}


def put(server: BootstrapServer, token: str = "", **changes: object) -> tuple[int, Any]:
    return call(server, "PUT", "/route", token, msgspec.json.encode({**MINIMAL, **changes}))


def test_a_minimal_put_lists_a_prefill_process_that_is_no_member() -> None:
    views = [VIEW]
    server = BootstrapServer(lambda: views[-1])
    guest = {**MINIMAL, "role": "prefill"}
    assert put(server) == (200, guest) == put(server, extra="ignored")
    assert call(server, "GET", "/route?engine_rank=7") == (200, guest)
    assert [item["engine_rank"] for item in call(server, "GET", "/route")[1]] == [2, 7, 10]
    assert put(server, rank_port=5101)[0] == 200, "it started again"
    assert call(server, "GET", "/route?engine_rank=7")[1]["rank_port"] == 5101
    views.append(msgspec.structs.replace(VIEW, instances=(*VIEW.instances, member(Role.PREFILL, 7, 4))))
    assert call(server, "GET", "/route?engine_rank=7")[1]["incarnation"] == 4, "a member hides the guest of its rank"
    assert put(server)[0] == 409 and "P7" in put(server)[1]["error"]["message"]
    assert put(server, rank_ip="127.0.0.1", rank_port=5007)[1]["incarnation"] == 4, "a member says what the view says"


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "decode"},
        {"role": 3},
        *({"rank_port": port} for port in (0, -1, 65536, "5100", None, True)),
        *({"engine_rank": rank} for rank in (-1, 2**31, "7", 1.5)),
        *({"rank_ip": ip} for ip in ("", "a b", "x" * 256, "10.0.0.7\n", 7)),
    ],
)
def test_a_wrong_put_is_refused_and_lists_nothing(changes: dict[str, object]) -> None:
    server = BootstrapServer(lambda: VIEW)
    status, answer = put(server, **changes)
    assert status == 400 and 0 < len(answer["error"]["message"]) < 200
    assert len(call(server, "GET", "/route")[1]) == 2


def test_guests_are_bounded_in_number_and_size_and_need_the_token() -> None:
    secrets = derive("a key of the cluster")
    server = BootstrapServer(lambda: VIEW, secrets)
    token = f"Bearer {secrets.token}"
    assert put(server)[0] == 401
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 4000):
        assert call(server, "PUT", "/route", token, body)[0] == 400
    assert call(server, "PUT", "/route", token, b" " * (MAX_BODY_BYTES + 2000))[0] == 413
    for rank in range(100, 100 + MAX_GUESTS):
        assert put(server, token, engine_rank=rank)[0] == 200
    assert put(server, token)[0] == 507
    assert put(server, token, engine_rank=100)[0] == 200, "a known one is listed anew"


def test_a_member_of_a_wide_instance_is_listed_with_its_group() -> None:
    """A reader finds all data ranks of the group, and whether all are there."""

    def part(rank: int, data_rank: int, group: int) -> InstanceInfo:
        place = GroupPlace(group, data_rank, 3, shares_experts=group == 2**62)
        return msgspec.structs.replace(member(Role.PREFILL, rank), group=place)

    members = (part(0, 1, 2**62), part(4, 0, 2**62), part(2, 0, 5), member(Role.PREFILL, 9))
    listed = call(BootstrapServer(lambda: msgspec.structs.replace(VIEW, instances=members)), "GET", "/route")[1]
    wide = {"id": str(2**62), "dp_size": 3, "shares_experts": True, "engine_ranks": [4, 0]}
    other = {"id": "5", "dp_rank": 0, "dp_size": 3, "shares_experts": False, "engine_ranks": [2]}
    assert [each.get("group") for each in listed] == [{**wide, "dp_rank": 1}, other, {**wide, "dp_rank": 0}, None]


def test_writes_are_large_only_if_every_transport_is_fast() -> None:
    """A logits row waits for the write before it, whichever transport that takes."""
    fast, slow = SimpleNamespace(batch_bytes=256 << 20), SimpleNamespace()
    assert batch_bytes_of([fast], 16 << 20) == 256 << 20
    assert batch_bytes_of([fast, slow], 16 << 20) == 16 << 20
    assert batch_bytes_of([], 16 << 20) == 16 << 20
