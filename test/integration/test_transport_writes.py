"""What a transport writes arrives, on one host and between hosts that are 2 ms and 40 ms apart: pages and aux rows, by
shm, Mooncake, NIXL, cuda_ipc on its twin of a GPU and on a GPU, if there is one."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transport_peers import BETWEEN_HOSTS, LAYERS, NUM_REGIONS, ON_ONE_HOST, Receiver, Writer
from transport_process import LAYOUT, NUM_PAGES, page_crcs, region

from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.shard_writer import pair_regions, plan_aux_copy, plan_page_copies
from chitu.kv_transfer.transports.transport import CopyList, OrderedTransport, WriteError
from chitu.types import Ready, new_room

pytestmark = [
    pytest.mark.parametrize("writer", [*ON_ONE_HOST, *BETWEEN_HOSTS], indirect=True, scope="module"),
    pytest.mark.transfer,
]
IDLE_S = 1.0


class Later:
    """A `Ready` that runs its work when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def synchronize(self) -> None:
        self._work()

    def wait(self, stream: object = None) -> None:
        raise AssertionError("the twin has no stream")


def test_scattered_and_contiguous_pages_arrive_where_they_belong_and_nowhere_else(
    writer: Writer, receiver: Receiver
) -> None:
    rng = random.Random(7)
    num_scattered = writer.way.few(60)
    src_pages = [*range(100, 140), *rng.sample(range(200, NUM_PAGES), num_scattered)]
    dst_pages = [*range(3, 43), *rng.sample(range(50, NUM_PAGES), num_scattered)]
    before = receiver.all_crcs()
    peer = writer.connect(receiver)
    writer.transport.write(peer, writer.copies(receiver, src_pages, dst_pages), 30.0)
    for index in range(NUM_REGIONS):
        sent, expected = page_crcs(writer.pool, index), before[index]
        for src_page, dst_page in zip(src_pages, dst_pages, strict=True):
            expected[dst_page] = sent[src_page]
        assert receiver.crcs(index) == expected
    writer.transport.disconnect(peer)


def test_a_sealed_aux_row_verifies_for_its_room_only(writer: Writer, receiver: Receiver) -> None:
    buffers = MetadataBuffers(writer.pool.aux_rows, 4 * LAYOUT.vocab_size)
    slot, room = buffers.allocate(), new_room()
    assert slot is not None
    writer.pool.aux_logits[slot] = torch.randn(LAYOUT.vocab_size)
    assert receiver.ask("verify", 2, room.hex()) == "Integrity"
    buffers.seal(slot, room)
    peer = writer.connect(receiver)
    writer.transport.write(peer, plan_aux_copy(writer.pool, receiver.memory, slot, 2), 10.0)
    assert receiver.ask("verify", 2, room.hex()) == "ok"
    assert receiver.ask("verify", 2, new_room().hex()) == "Integrity"
    writer.transport.disconnect(peer)


def test_five_thousand_small_blocks_arrive_or_as_many_as_fit_into_seconds(writer: Writer, receiver: Receiver) -> None:
    rng = random.Random(3)
    num_pages = writer.way.few(900)
    src_pages, dst_pages = rng.sample(range(NUM_PAGES), num_pages), rng.sample(range(NUM_PAGES), num_pages)
    copies = writer.copies(receiver, src_pages, dst_pages)
    assert len(copies.src) >= 5000 or num_pages < 900
    peer = writer.connect(receiver)
    writer.transport.write(peer, copies, 30.0)
    for index in range(NUM_REGIONS):
        sent, received = page_crcs(writer.pool, index), receiver.crcs(index)
        assert [received[page] for page in dst_pages] == [sent[page] for page in src_pages]
    writer.transport.disconnect(peer)


def test_bytes_that_are_still_to_be_computed_are_copied_when_they_are(writer: Writer, receiver: Receiver) -> None:
    """The layer is written by work that was launched before the event and has not run yet."""
    if not isinstance(writer.transport, OrderedTransport):
        pytest.skip(f"{writer.kind} is called when its sources are computed")
    peer, layer = writer.connect(receiver), region(writer.pool, 2)
    layer.zero_()
    if writer.kind == "cuda_ipc":
        ready: Ready = Later(lambda: layer[11].fill_(3.5))
    else:
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        layer[11].fill_(3.5)
        event = torch.cuda.Event()
        event.record()
        assert not event.query(), "the copy below has something to wait for"
        ready = event
    copies = plan_page_copies(pair_regions(writer.pool, receiver.memory), [11], [7], range(2, 4))
    writer.transport.write_after(peer, copies, [ready], 10.0)
    assert receiver.crcs(2)[7] == zlib.crc32(torch.full_like(layer[11].cpu(), 3.5).numpy().data)
    writer.transport.disconnect(peer)


def test_a_copy_out_of_range_is_refused_and_the_peer_stays_usable(writer: Writer, receiver: Receiver) -> None:
    peer, memory, pool = writer.connect(receiver), receiver.memory, writer.pool
    before = receiver.crcs(0)
    arena_end = memory.arena_base + memory.arena_bytes
    for copies in (
        CopyList([pool.arena_base], [arena_end - 4], [8]),
        CopyList([pool.arena_base], [memory.arena_base - 1], [8]),
        CopyList([pool.arena_base + pool.arena_bytes], [memory.arena_base], [8]),
    ):
        with pytest.raises(WriteError, match="outside") as caught:
            writer.transport.write(peer, copies, 5.0)
        assert caught.value.fenced
    assert receiver.crcs(0) == before
    writer.transport.write(peer, plan_page_copies(pair_regions(pool, memory), [1], [5], LAYOUT.regions_of(LAYERS)), 5.0)
    assert receiver.crcs(0)[5] == page_crcs(pool, 0)[1]
    writer.transport.disconnect(peer)


def test_reconnecting_leaves_no_descriptor_mapping_or_shared_file(writer: Writer, receiver: Receiver) -> None:
    copies = writer.copies(receiver, [5], [9])

    def once() -> tuple[int, int]:
        peer = writer.connect(receiver)
        writer.transport.write(peer, copies, 10.0)
        writer.transport.disconnect(peer)
        writer.transport.disconnect(peer)
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:chitu-kv")

    gc.collect()  # what earlier tests have left would go in the middle
    shared_before = sorted(os.listdir("/dev/shm"))
    counts = [once() for _ in range(20 if writer.way.network is None else 5)]
    assert counts[-1] == counts[1]
    assert sorted(os.listdir("/dev/shm")) == shared_before


def test_a_write_after_disconnect_is_refused(writer: Writer, receiver: Receiver) -> None:
    peer = writer.connect(receiver)
    writer.transport.disconnect(peer)
    with pytest.raises(WriteError, match="disconnected"):
        writer.transport.write(
            peer, plan_page_copies(pair_regions(writer.pool, receiver.memory), [1], [2], LAYOUT.regions_of(LAYERS)), 5.0
        )


def test_processes_that_are_connected_and_have_nothing_to_do_are_idle(writer: Writer, receiver: Receiver) -> None:
    peer = writer.connect(receiver)
    before_s = time.process_time(), float(receiver.ask("cpu"))
    threading.Event().wait(IDLE_S)
    assert time.process_time() - before_s[0] < IDLE_S / 8, "a thread of the writer spins"
    assert float(receiver.ask("cpu")) - before_s[1] < IDLE_S / 8, "a thread of the receiver spins"
    writer.transport.disconnect(peer)
