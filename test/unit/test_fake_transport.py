"""The fake transport moves real bytes and fails on demand; a writer picks a transport that both sides have."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from chitu.config.schema import PDDisaggregationConfig
from chitu.errors import ConfigError, MissingDependency, TransferFailed
from chitu.kv_transfer.shard_writer import open_shards
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.transport import CopyList, WriteError
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo, KVLayout, RankMemory, TransportSession
from chitu.testing.fake_transport import FakeFabric, FakePeer, FakeTransport, Fault, FaultKind


class Pair:
    """P writes 8 bytes of 7s into D's memory."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.p, self.d = FakeTransport(self.fabric, "P"), FakeTransport(self.fabric, "D")
        self.source, self.target = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
        self.p.register(self.source.ctypes.data, 64)
        self.d.register(self.target.ctypes.data, 64)
        base = self.target.ctypes.data
        self.memory = RankMemory(0, (self.d.local_session(),), base, 64, (), 8, 0, base, 8, 0)
        self.peer: FakePeer = self.p.connect(self.memory, self.d.local_session())

    def copies(self, offset: int = 0) -> CopyList:
        return CopyList([self.source.ctypes.data], [self.target.ctypes.data + offset], [8])

    def write(self, offset: int = 0, timeout_s: float = 1.0) -> None:
        self.p.write(self.peer, self.copies(offset), timeout_s)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_bytes_move(pair: Pair) -> None:
    pair.write(8)
    assert pair.target.tolist() == [0] * 8 + [7] * 8 + [0] * 48
    assert pair.fabric.num_writes == 1


def test_a_dropped_write_is_settled_and_the_next_one_works(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.DROP))
    with pytest.raises(WriteError) as caught:
        pair.write()
    assert caught.value.settled and not pair.target.any()
    pair.write()
    assert pair.target[:8].all()


def test_a_late_write_lands_later_with_the_bytes_of_then(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.LATE))
    with pytest.raises(WriteError) as caught:
        pair.write()
    assert not caught.value.settled and not pair.target.any()
    assert not pair.p.settle(pair.peer, 1.0)
    pair.source[:] = 9
    assert pair.fabric.release_late_writes() == 1
    assert pair.target[:8].tolist() == [9] * 8
    assert pair.p.settle(pair.peer, 1.0)


def test_a_dead_peer_refuses_settles_and_gets_no_late_write(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.LATE))
    with pytest.raises(WriteError):
        pair.write()
    pair.fabric.kill("D")
    assert pair.p.settle(pair.peer, 1.0)
    assert pair.fabric.release_late_writes() == 0 and not pair.target.any()
    with pytest.raises(WriteError, match="dead") as caught:
        pair.write()
    assert caught.value.settled
    with pytest.raises(TransferFailed):
        pair.p.connect(pair.memory, pair.d.local_session())


def test_one_flipped_bit(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.CORRUPT, byte=3))
    pair.write()
    assert pair.target[:8].tolist() == [7, 7, 7, 6, 7, 7, 7, 7]


def test_a_delayed_write_blocks_until_the_step(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.DELAY))
    has_begun = threading.Event()
    pair.fabric.on_write = lambda target, copies: has_begun.set()
    thread = threading.Thread(target=pair.write, args=(0, 30.0))
    thread.start()
    assert has_begun.wait(10)
    assert thread.is_alive() and not pair.target.any()
    while thread.is_alive():
        pair.fabric.step()
        thread.join(0.01)
    assert pair.target[:8].all()


def test_a_delay_beyond_the_timeout_becomes_a_late_write(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.DELAY))
    with pytest.raises(WriteError) as caught:
        pair.write(timeout_s=0.01)
    assert not caught.value.settled and pair.fabric.num_late_writes == 1


def test_a_fault_for_another_peer_waits_for_it(pair: Pair) -> None:
    pair.fabric.inject(Fault(FaultKind.DROP, to="E"))
    pair.write()
    assert pair.target[:8].all()


def test_addresses_outside_registered_memory_are_refused(pair: Pair) -> None:
    for offset in (-1, 57):
        with pytest.raises(WriteError, match="outside"):
            pair.write(offset)
    assert not pair.target.any()


def test_a_writer_takes_the_first_transport_that_reaches_the_peer(pair: Pair) -> None:
    layout = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="float32", vocab_size=2)
    info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, 1, "h", 1, layout, (pair.memory,))
    stranger = FakeTransport(FakeFabric(), "X")
    open_shards(info, layout, 0, pair.memory, [stranger, pair.p]).close()
    with pytest.raises(TransferFailed, match=r"offered: fake; mine: fake\) fake cannot reach D"):
        open_shards(info, layout, 0, pair.memory, [stranger])
    with pytest.raises(TransferFailed, match="mine: none"):
        open_shards(info, layout, 0, pair.memory, [])


def test_shm_is_preferred_on_one_host_and_refused_between_hosts() -> None:
    (shm,) = open_transports(PDDisaggregationConfig(transport="shm"), "127.0.0.1")
    here = TransportSession("shm", "x", {"host_id": shm._host_id})  # type: ignore[attr-defined]
    there = TransportSession("shm", "x", {"host_id": "another boot"})
    assert shm.can_reach(here) and not shm.can_reach(there)
    assert not shm.can_reach(TransportSession("mooncake", "127.0.0.1:1"))
    shm.close()


def test_cuda_ipc_needs_a_pool_in_gpu_memory_and_a_driver() -> None:
    config = PDDisaggregationConfig(transport="cuda_ipc")
    with pytest.raises(ConfigError, match="the device is cpu"):
        open_transports(config, "127.0.0.1")
    if not os.path.exists("/dev/nvidiactl"):
        for transport in ("cuda_ipc", "auto"):
            with pytest.raises(MissingDependency, match="NVIDIA driver"):
                open_transports(PDDisaggregationConfig(transport=transport), "127.0.0.1", "cuda:1")
