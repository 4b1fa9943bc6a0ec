"""A writer picks a transport that both sides have; each transport says whom it can reach."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
from support.fake_transport import FakeFabric, FakeTransport

from chitu.config.schema import PDDisaggregationConfig
from chitu.errors import ConfigError, MissingDependency, TransferFailed
from chitu.kv_transfer.shard_writer import open_shards
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.mapped import MappedPeer, MappedPeers
from chitu.kv_transfer.transports.transport import WriteError, pinning_hint
from chitu.protocol import PROTOCOL_VERSION, KVArgsRegisterInfo, KVLayout, RankMemory, TransportSession


def test_a_writer_takes_the_first_transport_that_reaches_the_peer() -> None:
    fabric, target = FakeFabric(), np.zeros(64, np.uint8)
    p, d = FakeTransport(fabric, "P"), FakeTransport(fabric, "D")
    for transport in (p, d):
        transport.register(target.ctypes.data, 64)
    base = target.ctypes.data
    memory = RankMemory(0, (d.local_session(),), base, 64, (base, base), (4, 4), 0, base, 8, 0)
    layout = KVLayout.uniform("m", num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="float32", vocab_size=2)
    info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, 1, "h", 1, layout, (memory,))
    stranger = FakeTransport(FakeFabric(), "X")
    open_shards(info, layout, 0, memory, [stranger, p]).close()
    with pytest.raises(TransferFailed, match=r"offered: fake; mine: fake\) fake cannot reach D"):
        open_shards(info, layout, 0, memory, [stranger])
    with pytest.raises(TransferFailed, match="mine: none"):
        open_shards(info, layout, 0, memory, [])


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


# ----------------------------------------------------------------------------------------------------------------------
# A mapping is removed once, when its peer was removed and no thread writes to it any more, and never before.


class Process:
    def __init__(self) -> None:
        self.is_running = True
        self.num_closed = 0

    def is_alive(self) -> bool:
        return self.is_running

    def close(self) -> None:
        self.num_closed += 1


class Ledger:
    def __init__(self) -> None:
        self.unmapped: list[MappedPeer] = []
        self.peers = MappedPeers("shm")
        self.process = Process()
        self.peer = MappedPeer("host/1/2", 0, 0, self.process, 0, self._unmap)  # type: ignore[arg-type]
        self.peers.add(self.peer)

    def _unmap(self) -> None:
        assert self.process.num_closed == 1
        self.unmapped.append(self.peer)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_an_idle_peer_is_unmapped_when_it_is_removed_and_only_then(ledger: Ledger) -> None:
    with ledger.peers.writing(ledger.peer):
        pass
    assert not ledger.unmapped
    ledger.peers.remove(ledger.peer)
    ledger.peers.remove(ledger.peer)
    assert ledger.unmapped == [ledger.peer]


def test_a_peer_that_is_removed_in_the_middle_of_two_writes_is_unmapped_behind_the_last(ledger: Ledger) -> None:
    first, second = ledger.peers.writing(ledger.peer), ledger.peers.writing(ledger.peer)
    first.__enter__()
    second.__enter__()
    ledger.peers.remove(ledger.peer)
    first.__exit__(None, None, None)
    assert not ledger.unmapped, "the other write still runs into it"
    ledger.peers.remove(ledger.peer)
    assert not ledger.unmapped
    second.__exit__(None, None, None)
    assert ledger.unmapped == [ledger.peer]


def test_a_write_that_fails_is_over_too(ledger: Ledger) -> None:
    with pytest.raises(RuntimeError, match="device"), ledger.peers.writing(ledger.peer):
        ledger.peers.remove(ledger.peer)
        raise RuntimeError("device")
    assert ledger.unmapped == [ledger.peer]


def test_nothing_is_written_to_a_peer_that_was_removed(ledger: Ledger) -> None:
    ledger.peers.remove_all()
    assert ledger.unmapped == [ledger.peer]
    with pytest.raises(WriteError, match="was disconnected") as failed, ledger.peers.writing(ledger.peer):
        pytest.fail("it let the write begin")
    assert failed.value.fenced


def test_a_write_whose_reader_died_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(WriteError, match="has ended"), ledger.peers.writing(ledger.peer):
        ledger.process.is_running = False
    with pytest.raises(WriteError, match="has ended"), ledger.peers.writing(ledger.peer):
        pass
    assert not ledger.unmapped


def test_memory_that_cannot_be_pinned_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, shown in ((8 << 20, "8192 KiB"), (resource.RLIM_INFINITY, "unlimited")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert f"`ulimit -l` is {shown} here" in pinning_hint()
