"""The main rank of P and its followers write together: real lanes between them, faults of the fake transport."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shard_pools import Ranks, layout_of

from chitu.errors import TransferFailed
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TPDecodeWriter, lane_address, make_lane_folder
from chitu.kv_transfer.shard_writer import ShardWriter, TransferKVChunk, open_shards
from chitu.kv_transfer.transports.transport import WriteError
from chitu.testing.fake_transport import FakeFabric, Fault, FaultKind

CHUNK = TransferKVChunk(0, 2, 1, 4)
SRC_PAGES, DST_PAGES = [0, 3, 1, 2], [5, 8, 9, 4]


def thread(name: str, target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


class Instances:
    """A P of `src_size` ranks, with its followers in threads, and a D of `dst_size`; 4 KV heads."""

    def __init__(self, src_size: int, dst_size: int) -> None:
        self.fabric = FakeFabric()
        self.p = Ranks(self.fabric, "p", layout_of(4, src_size))
        self.d = Ranks(self.fabric, "d", layout_of(4, dst_size))
        for pool in self.p.pools:
            pool.fill()
        self.fan_out = FanOut(src_size - 1, transfer_threads=2)
        self.followers = [
            ShardFollower(
                self.p.layout,
                rank,
                self.p.pools[rank],
                [self.p.transports[rank]],
                self.fan_out.base,
                self.fan_out.num_lanes,
            )
            for rank in range(1, src_size)
        ]
        for follower in self.followers:
            follower.start(thread)

    def open(self, incarnation: int = 7) -> TPDecodeWriter:
        info = self.d.registration(incarnation)

        def own() -> ShardWriter:
            return open_shards(info, self.p.layout, 0, self.p.pools[0], self.p.transports[:1])

        return self.fan_out.open(info, own)

    def close(self) -> None:
        self.fan_out.close()
        for follower in self.followers:
            follower.close()


@pytest.fixture(params=[(2, 1), (2, 2), (2, 4), (4, 2), (8, 4), (4, 8)], ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def instances(request: pytest.FixtureRequest) -> Iterator[Instances]:
    made = Instances(*request.param)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Instances]:
    made = Instances(2, 2)
    yield made
    made.close()


class Later:
    """A `Ready` that runs its work when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def synchronize(self) -> None:
        self._work()

    def wait(self, stream: object = None) -> None:
        raise AssertionError("the fake transport has no stream")


def test_no_rank_writes_before_the_main_ranks_event_has_passed(pair: Instances) -> None:
    """The event is behind the sum over the ranks, so everything before it is computed on all ranks."""
    is_written = threading.Event()
    pair.fabric.on_write = lambda peer, copies: is_written.set()
    writer = pair.open()
    early: list[bool] = []
    chunk = CHUNK._replace(ready=Later(lambda: early.append(is_written.wait(0.3))))  # time for a follower's early write
    assert len(writer.write_pages([chunk], SRC_PAGES, DST_PAGES, 5.0)) == 2
    assert not early[0] and is_written.is_set()
    pair.d.check(DST_PAGES[1:], SRC_PAGES[1:], range(2))


def test_all_ranks_write_their_heads_and_count_their_bytes(instances: Instances) -> None:
    writer = instances.open()
    moved = writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    instances.d.check(DST_PAGES[1:], SRC_PAGES[1:], range(2))
    layout = instances.d.layout
    assert len(moved) == instances.p.layout.tp_size
    assert sum(moved) == 3 * 4 * instances.d.pools[0].page_bytes * layout.tp_size
    assert writer.settle(1.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.LATE])
def test_a_failed_write_of_any_rank_fails_the_write_with_its_meaning(
    pair: Instances, rank: int, kind: FaultKind
) -> None:
    writer = pair.open()
    pair.fabric.inject(Fault(kind, to=f"d.{rank}"))
    with pytest.raises(WriteError, match=("TP rank 1: " if rank else "") + f"fake: the write to d.{rank}") as caught:
        writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    assert caught.value.settled == (kind is FaultKind.DROP)
    assert writer.settle(1.0) == caught.value.settled
    pair.fabric.release_late_writes()
    assert writer.settle(1.0)
    writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    pair.d.check(DST_PAGES[1:], SRC_PAGES[1:], range(2))


def test_a_follower_that_is_late_leaves_the_write_unsettled_until_it_has_ended(
    pair: Instances,
) -> None:
    pair.fan_out.answer_grace_s = 0.05
    writer = pair.open()
    begun, go_on = threading.Event(), threading.Event()

    def hold(peer: str, _copies: object) -> None:
        if peer == "d.1":
            begun.set()
            assert go_on.wait(10)

    pair.fabric.on_write = hold
    with pytest.raises(WriteError, match="TP rank 1 did not answer") as caught:
        writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 0.05)
    assert begun.is_set() and not caught.value.settled
    with pytest.raises(TransferFailed, match="TP rank 1 did not answer"):
        writer.settle(0.05)  # it is queued behind the write in the follower's lane
    go_on.set()
    assert writer.settle(5.0), "late answers are dropped, not taken for this one"
    pair.d.check(DST_PAGES[1:], SRC_PAGES[1:], range(2))


def test_peers_in_different_lanes_do_not_wait_for_each_other(pair: Instances) -> None:
    slow, fast = pair.open(7), pair.open(8)
    begun, go_on = threading.Event(), threading.Event()
    calls = itertools.count()

    def hold_the_first(peer: str, _copies: object) -> None:
        if peer == "d.1" and next(calls) == 0:
            begun.set()
            assert go_on.wait(10)

    pair.fabric.on_write = hold_the_first
    moved: list[tuple[int, ...]] = []
    held = thread("held", lambda: moved.append(slow.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 10.0)))
    held.start()
    assert begun.wait(10)
    assert fast.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0) == fast.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    assert not moved
    go_on.set()
    held.join(10)
    assert len(moved) == 1


def test_a_rank_that_cannot_reach_d_refuses_it_and_says_which(pair: Instances) -> None:
    pair.fabric.kill("d.1")
    with pytest.raises(TransferFailed, match=r"TP rank 1: no common transport .* d\.1 cannot be reached"):
        pair.open()


def test_a_closed_peer_takes_no_write_and_can_be_opened_again(pair: Instances) -> None:
    writer = pair.open()
    writer.close()
    pair.open(8)  # behind the close in the same lane, so the close is done on all ranks
    with pytest.raises(WriteError, match="TP rank 1 has no connection") as caught:
        writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    assert caught.value.settled
    assert len(pair.open().write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)) == 2


def connects_as(uid: int, path: str) -> bool:
    """Return whether a child process of that user can connect."""
    child = os.fork()
    if not child:  # system calls only: other threads do not exist in the child
        code = 1
        with contextlib.suppress(OSError):
            os.setgid(uid)
            os.setuid(uid)
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_user_cannot_take_a_followers_place_and_the_folder_is_gone_once_all_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o777)
        monkeypatch.setattr(tempfile, "tempdir", open_to_all)
        fan_out = FanOut(1, transfer_threads=2)
        assert stat.S_IMODE(os.stat(fan_out.base).st_mode) == 0o700
        path = lane_address(fan_out.base, 2, 1).removeprefix("ipc://")
        assert os.path.dirname(path) == fan_out.base and stat.S_ISSOCK(os.stat(path).st_mode)
        with open("/proc/net/unix", encoding="utf-8") as names:
            assert fan_out.base in (text := names.read()) and f"@{fan_out.base}" not in text
        if os.getuid() == 0:
            assert not connects_as(65534, path)
        ranks = Ranks(FakeFabric(), "p", layout_of(4, 2))
        follower = ShardFollower(
            ranks.layout, 1, ranks.pools[1], [ranks.transports[1]], fan_out.base, fan_out.num_lanes
        )
        follower.start(thread)
        fan_out.wait_connected()
        assert not os.listdir(open_to_all), "what is killed from here on leaves nothing"
        fan_out.close()
        follower.close()


def test_lanes_go_to_slash_tmp_where_the_temporary_folder_has_too_long_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tmp_path)
    for length, is_there in ((80, True), (81, False)):
        folder = base + "/" + "x" * (length - len(base) - 1)
        os.mkdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        lanes = make_lane_folder()
        assert (os.path.dirname(lanes) == folder) == is_there
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(lane_address(lanes, 99, 99).removeprefix("ipc://"))
        shutil.rmtree(lanes)
