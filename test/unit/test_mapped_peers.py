"""A mapping is removed once, when its peer was removed and no thread writes to it any more, and never before."""

from __future__ import annotations

import pytest

from chitu.kv_transfer.transports.mapped import MappedPeer, MappedPeers
from chitu.kv_transfer.transports.transport import WriteError


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
    assert failed.value.settled


def test_a_write_whose_reader_died_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(WriteError, match="has ended"), ledger.peers.writing(ledger.peer):
        ledger.process.is_running = False
    with pytest.raises(WriteError, match="has ended"), ledger.peers.writing(ledger.peer):
        pass
    assert not ledger.unmapped
