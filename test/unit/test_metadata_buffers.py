"""Aux slots: counts, and rows that verify only if they are whole and belong to the room."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from chitu.errors import Integrity
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.types import new_room

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


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 24, AUX_HEADER_BYTES, AUX_HEADER_BYTES + 4 * VOCAB - 1])
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
    magic, version, _, length, row_room, cached_tokens = struct.unpack_from("<8sIIQ16sI", rows[0].tobytes())
    assert (magic, version, length, row_room, cached_tokens) == (b"chituAUX", 2, 4 * VOCAB, room, 48)
    assert not rows[0, 44:AUX_HEADER_BYTES].any()


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
    """The fields are magic, version, checksum, length, room and cached tokens (44 bytes) and the logits; reserved bytes
    and padding carry nothing."""
    rows, room = np.zeros((1, ROW_BYTES), np.uint8), new_room()
    buffers = MetadataBuffers(rows, 4 * VOCAB)
    buffers.get(0)[:] = np.random.default_rng(1).normal(size=VOCAB)
    buffers.seal(0, room, 1 << 20)
    fields = {*range(44), *range(AUX_HEADER_BYTES, AUX_HEADER_BYTES + 4 * VOCAB)}
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
