"""When a write over RDMA is fenced: an engine that ends entries as a test says, on a network that may hold packets of
an attempt that failed for a second. Time is the test's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chitu.errors import PeerUnreachable
from chitu.kv_transfer.transports import mooncake
from chitu.kv_transfer.transports.mooncake import (
    DONE,
    DRAIN_INTERVAL_S,
    FIRST_ATTEMPT_S,
    PACKET_LIFE_S,
    MooncakePeer,
    MooncakeTransport,
)
from chitu.kv_transfer.transports.transport import CopyList, WriteError
from chitu.protocol import RankMemory, TransportSession

FAILED = -1
HELD_S = 1.0
"""How long the network holds a packet of an attempt after its entry has ended."""
NUM_ENTRIES, ENTRY_BYTES = 4, 64


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Engine:
    """Stand-in for `mooncake.engine.TransferEngine`."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.ends: dict[int, tuple[float, int]] = {}
        """When each entry ends, and how; entries that are not here do not end."""
        self.entries: list[int] = []
        self.next_ends: list[tuple[float, int]] = []
        """Durations and outcomes of the next entries; after them each ends well at once."""
        self.registered: list[tuple[int, int]] = []
        """Memory of this process, as the engine knows it."""
        self.can_read = True
        self.reads: list[float] = []
        self.landed_s = 0.0
        """Time at which the last packet of all attempts has landed."""

    def initialize(self, *_: object) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_register_memory(self, bases: list[int], sizes: list[int]) -> int:
        self.registered += zip(bases, sizes, strict=True)
        return 0

    def unregister_memory(self, *_: object) -> int:
        return 0

    def send_probe(self, *_: object) -> int:
        return 0

    def transfer_submit_write(self, *_: object) -> int:
        handle = 1 + len(self.ends) + len(self.entries)
        self.entries.append(handle)
        duration_s, status = self.next_ends.pop(0) if self.next_ends else (0.0, DONE)
        self.ends[handle] = self.time.now_s + duration_s, status
        if duration_s > FIRST_ATTEMPT_S and duration_s < float("inf"):
            self.landed_s = max(self.landed_s, self.ends[handle][0] + HELD_S)
        return handle

    def batch_transfer_async_read(self, _: str, targets: list[int], __: list[int], sizes: list[int]) -> int:
        assert any(base <= targets[0] and targets[0] + sizes[0] <= base + size for base, size in self.registered)
        handle = 1 + len(self.ends) + len(self.entries)
        self.entries.append(handle)
        self.reads.append(self.time.now_s)
        self.ends[handle] = self.time.now_s, DONE if self.can_read else FAILED
        return handle

    def batch_transfer_async_write(self, *_: object) -> int:
        raise AssertionError("the status of a batch can only be waited for")

    get_batch_transfer_status = batch_transfer_async_write

    def transfer_check_status(self, handle: int) -> int:
        due_s, status = self.ends[handle]
        return status if self.time.now_s >= due_s else 0


class World:
    def __init__(self) -> None:
        self.time = Time()
        self.engine = Engine(self.time)
        self.is_refused = False
        self.looks = 0

    def look(self, peer: MooncakePeer) -> bool:
        self.looks += 1
        return self.is_refused

    def connect(self) -> None:
        self.transport = MooncakeTransport("127.0.0.1", "rdma")
        self.source = np.zeros(NUM_ENTRIES * ENTRY_BYTES, np.uint8)
        base = int(self.source.ctypes.data)
        self.transport.register(base, self.source.nbytes)
        session = TransportSession("mooncake", "127.0.0.1:2", {"protocol": "rdma"})
        memory = RankMemory(0, (session,), base, self.source.nbytes, (), (), 0, 0, 0, 0)
        peer = self.transport.connect(memory, session)
        assert isinstance(peer, MooncakePeer)
        self.peer = peer
        self.engine.reads.clear()
        addresses = [base + number * ENTRY_BYTES for number in range(NUM_ENTRIES)]
        self.copies = CopyList(addresses, addresses, [ENTRY_BYTES] * NUM_ENTRIES)

    def write(self, *ends: tuple[float, int]) -> bool:
        """Write entries that end as told. Return whether the write succeeded; a failure must not be fenced."""
        self.engine.next_ends = list(ends)
        try:
            self.transport.write(self.peer, self.copies, 5.0)
        except WriteError as error:
            assert not error.fenced
            return False
        return True

    def fence(self) -> bool:
        """Ask every half second, as P does, for two minutes. Whenever it is fenced no packet may be on its way."""
        for _ in range(240):
            if self.transport.fence(self.peer, 0.02):
                assert self.time.now_s >= self.engine.landed_s, "a packet lands in pages that D may use again"
                return True
            self.time.sleep(0.5)
        return False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    library: Any = SimpleNamespace(TransferEngine=lambda: world.engine, SUPPORT_CUDA=False)
    monkeypatch.setattr(mooncake, "_import_engine", lambda: library)
    monkeypatch.setattr(mooncake, "_check_rdma", lambda *_: None)
    monkeypatch.setattr(mooncake, "_is_refused", world.look)
    monkeypatch.setattr(mooncake, "time", world.time)
    monkeypatch.setattr(mooncake.os, "environ", {})
    world.connect()
    yield world
    world.transport.close()


LATE = [pytest.param((7.0, status), id=name) for status, name in ((DONE, "COMPLETED"), (FAILED, "FAILED"))]


@pytest.mark.parametrize("end", LATE)
def test_a_late_write_is_fenced_once_it_has_ended_a_packet_has_lived_and_a_read_has_succeeded(
    world: World, end: tuple[float, int]
) -> None:
    assert not world.write(end)
    began_s = world.time.now_s - 5.0
    assert world.fence()
    assert world.time.now_s - began_s < 7.0 + PACKET_LIFE_S + DRAIN_INTERVAL_S + 1.5
    assert world.write(), "the pair goes on"


def test_a_planted_short_life_of_packets_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "PACKET_LIFE_S", 0.0)
    assert not world.write((7.0, DONE))
    with pytest.raises(AssertionError, match="a packet lands"):
        world.fence()


def test_a_write_that_failed_is_fenced_only_when_its_last_entry_has_ended(world: World) -> None:
    assert not world.write((0.0, DONE), (0.1, FAILED), (40.0, DONE))
    began_s = world.time.now_s
    assert world.fence()
    assert 35.0 + PACKET_LIFE_S <= world.time.now_s - began_s < 45.0


def test_a_path_that_is_down_is_tried_now_and_then_and_heals(world: World) -> None:
    world.engine.can_read = False
    assert not world.write((1.0, FAILED))
    assert not world.fence()
    gaps_s = np.diff(world.engine.reads)
    assert len(gaps_s) > 10 and gaps_s.min() >= DRAIN_INTERVAL_S and world.looks <= len(gaps_s) + 1
    world.engine.can_read = True
    healed_s = world.time.now_s
    assert world.fence() and world.time.now_s - healed_s < DRAIN_INTERVAL_S + 1.5


def test_a_dead_peer_is_fenced_although_its_entries_never_end(world: World) -> None:
    assert not world.write((float("inf"), DONE))
    assert not world.fence() and world.looks < 120 / DRAIN_INTERVAL_S + 2
    world.is_refused = True
    assert world.fence()


@pytest.mark.parametrize(("durations_s", "waits"), [((0.1,), False), ((0.3, 0.6, 0.9, 1.2), False), ((0.7,), True)])
def test_a_write_that_stalled_waits_for_packets_of_an_earlier_attempt(
    world: World, durations_s: tuple[float, ...], waits: bool
) -> None:
    began_s = world.time.now_s
    assert world.write(*((duration_s, DONE) for duration_s in durations_s))
    took_s = world.time.now_s - began_s
    assert (took_s >= max(durations_s) + PACKET_LIFE_S) == waits and took_s < max(durations_s) + PACKET_LIFE_S + 0.1


def test_a_path_that_is_down_at_connect_may_come_back(world: World) -> None:
    world.engine.can_read = False
    with pytest.raises(PeerUnreachable, match="no read of the arena"):
        world.connect()
