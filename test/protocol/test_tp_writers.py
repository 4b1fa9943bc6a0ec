"""The main rank of P and its followers write together: real lanes between them, faults of the fake transport."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import socket
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_pools import AUX_ROW_BYTES, HEAD_BYTES, NUM_AUX, NUM_LAYERS, NUM_PAGES, Ranks, layout_of, mixed_layout
from support.fake_transport import FakeFabric, FakeTransport, Fault, FaultKind

from chitu.config.tensor_parallel import kv_heads_of, kv_heads_per_rank, share_of, why_not
from chitu.engine.executor import DoneStep, ExecutorInfo, LayerCallback, Offload, StepPlan, StepResult
from chitu.engine.tp_executor import TensorParallelExecutor, run_follower
from chitu.errors import BadFrame, IncompatibleLayout, TransferFailed
from chitu.kv_transfer.layout import check_compatible
from chitu.kv_transfer.peers import check_registration
from chitu.kv_transfer.ranks import FanOut, ShardFollower, TPDecodeWriter, lane_address, make_lane_folder
from chitu.kv_transfer.shard_writer import (
    PageSlice,
    ShardWriter,
    TransferKVChunk,
    head_copy,
    open_shards,
    pair_regions,
    plan_page_copies,
)
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, WriteError
from chitu.types import Ready

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
    assert sum(moved) == 3 * 4 * instances.d.pools[0].page_bytes[0] * layout.tp_size
    assert writer.fence(1.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.LATE])
def test_a_failed_write_of_any_rank_fails_the_write_with_its_meaning(
    pair: Instances, rank: int, kind: FaultKind
) -> None:
    writer = pair.open()
    pair.fabric.inject(Fault(kind, to=f"d.{rank}"))
    with pytest.raises(WriteError, match=("TP rank 1: " if rank else "") + f"fake: the write to d.{rank}") as caught:
        writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    assert caught.value.fenced == (kind is FaultKind.DROP)
    assert writer.fence(1.0) == caught.value.fenced
    pair.fabric.release_late_writes()
    assert writer.fence(1.0)
    writer.write_pages([CHUNK], SRC_PAGES, DST_PAGES, 5.0)
    pair.d.check(DST_PAGES[1:], SRC_PAGES[1:], range(2))


def test_a_follower_that_is_late_leaves_the_write_unfenced_until_it_has_ended(
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
    assert begun.is_set() and not caught.value.fenced
    with pytest.raises(TransferFailed, match="TP rank 1 did not answer"):
        writer.fence(0.05)  # it is queued behind the write in the follower's lane
    go_on.set()
    assert writer.fence(5.0), "late answers are dropped, not taken for this one"
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
    assert caught.value.fenced
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


# ----------------------------------------------------------------------------------------------------------------------
# An offload on two ranks with a slower follower: its pages are announced only when both ranks have copied. The main
# rank and the follower run the real executor shells over a broadcast in this process. Their only computation is a copy
# of pages to host memory, in which the follower can be held.


OLD, NEW = 7, 9


class Runner:
    """The parts of a `ModelRunner` that the shells need: pages, and an offload that copies them."""

    info = ExecutorInfo(num_slots=1, max_model_len=64, vocab_size=10, num_layers=1, eos_token_ids=())

    def __init__(self, before_copy: Callable[[], None]) -> None:
        self.pages = np.full(4, OLD)
        self.saved: dict[int, np.ndarray] = {}
        self._before_copy = before_copy

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        for offload in plan.offload:
            self._before_copy()
            self.saved[offload.key] = self.pages.copy()
        return StepResult([], [])

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        return DoneStep(self.execute(plan, on_layer))

    def close(self) -> None: ...


class Group:
    """Broadcast and barrier of two threads."""

    rank = 1

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._barrier = threading.Barrier(2, timeout=20)

    def send(self, data: bytes) -> None:
        self._orders.put(data)

    def receive(self) -> bytes:
        return self._orders.get(timeout=20)

    def barrier(self) -> None:
        self._barrier.wait()

    def close(self) -> None: ...


class NoWatch:
    """The `ProcessWatch` and `Lifeline` of ranks that are threads."""

    def disarm(self) -> None: ...

    def close(self) -> None: ...


def test_pages_that_a_slow_follower_still_copies_are_not_free_yet() -> None:
    is_copying, may_copy = threading.Event(), threading.Event()

    def slowly() -> None:
        is_copying.set()
        assert may_copy.wait(20)

    group, main, slow = Group(), Runner(lambda: None), Runner(slowly)
    executor = TensorParallelExecutor(main, group, NoWatch())  # type: ignore[arg-type]
    follower = threading.Thread(target=run_follower, args=(slow, group, NoWatch()), daemon=True)
    follower.start()
    step_is_over = threading.Event()

    def step() -> None:
        """Run D's step thread: the step that offloads, and the next, which announces the pages to P, which writes."""
        executor.execute(StepPlan(offload=[Offload(slot=0, key=1)]))
        step_is_over.set()
        for runner in (main, slow):
            runner.pages[:] = NEW

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    assert is_copying.wait(20)
    assert not step_is_over.wait(0.2), "the main rank did not wait for its follower"
    may_copy.set()
    stepping.join(20)
    executor.execute(StepPlan())
    executor.close()
    follower.join(20)
    assert not follower.is_alive()
    assert (main.saved[1] == OLD).all() and (slow.saved[1] == OLD).all()


def test_a_follower_that_hangs_does_not_hold_up_the_end() -> None:
    answers = threading.Event()

    class HangingGroup(Group):
        def barrier(self) -> None:
            assert answers.wait(20)

        def close(self) -> None:
            raise AssertionError("a rank may still use it")

    executor = TensorParallelExecutor(Runner(lambda: None), HangingGroup(), NoWatch(), 0.01)  # type: ignore[arg-type]
    executor.close()
    answers.set()


# ----------------------------------------------------------------------------------------------------------------------
# Every byte that the ranks of D need is written once, by a rank of P that has it, for all combinations of TP sizes.


def tp_sizes(num_kv_heads: int) -> list[int]:
    return [tp for tp in range(1, 9) if not why_not(tp * num_kv_heads, num_kv_heads, tp)]


sizes = st.integers(1, 8).flatmap(
    lambda heads: st.tuples(st.just(heads), st.sampled_from(tp_sizes(heads)), st.sampled_from(tp_sizes(heads)))
)


@given(sizes)
def test_every_head_of_every_rank_of_d_has_exactly_one_writer_and_the_work_is_even(sizes: tuple[int, int, int]) -> None:
    heads, src_size, dst_size = sizes
    written = [0] * src_size
    for dst_rank in range(dst_size):
        got: Counter[int] = Counter()
        mine = kv_heads_of(heads, dst_size, dst_rank)
        for src_rank in range(src_size):
            copy = head_copy(heads, src_size, src_rank, dst_size, dst_rank)
            if copy is None:
                continue
            source = kv_heads_of(heads, src_size, src_rank)
            for i in range(copy.num_heads):
                assert source[copy.src_first + i] == mine[copy.dst_first + i]
                got[mine[copy.dst_first + i]] += 1
            written[src_rank] += copy.num_heads
        assert got == Counter(mine)
    assert head_copy(heads, src_size, 0, dst_size, 0) is not None, "the logits rows take this way"
    # If P has more copies of a head than D needs, some ranks of P are idle; the rest share evenly.
    assert max(written) - min(n for n in written if n) <= 1
    if dst_size >= src_size:
        assert min(written) > 0


@given(sizes, st.data())
def test_every_byte_lands_once_in_its_place(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    heads, src_size, dst_size = sizes
    fabric = FakeFabric()
    prefill, decode = (Ranks(fabric, name, layout_of(heads, tp)) for name, tp in (("p", src_size), ("d", dst_size)))
    for pool in prefill.pools:
        pool.fill()
    num_pages = data.draw(st.integers(1, 6))
    src_pages, dst_pages = (data.draw(st.permutations(range(NUM_PAGES)))[:num_pages] for _ in range(2))
    layers = data.draw(st.sampled_from([range(1), range(1, 2), range(2)]))
    written: Counter[int] = Counter()

    def count(_peer: str, copies: CopyList) -> None:
        for dst, length in zip(copies.dst, copies.length, strict=True):
            written.update(range(dst, dst + length, 4))

    fabric.on_write = count
    chunk = TransferKVChunk(layers.start, layers.stop, 0, num_pages)
    moved = 0
    for rank, (pool, transport) in enumerate(zip(prefill.pools, prefill.transports, strict=True)):
        writer = open_shards(decode.registration(), prefill.layout, rank, pool, [transport])
        moved += sum(writer.write_pages([chunk], src_pages, dst_pages, 1.0))
        assert writer.fence(0.1)
    decode.check(dst_pages, src_pages, layers)
    assert set(written.values()) == {1}
    assert moved == num_pages * 2 * len(layers) * dst_size * kv_heads_per_rank(heads, dst_size) * HEAD_BYTES


@pytest.mark.parametrize("src_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dst_size", [1, 2, 4, 8])
def test_layers_that_differ_land_in_their_places_and_one_without_kv_moves_nothing(src_size: int, dst_size: int) -> None:
    fabric = FakeFabric()
    prefill, decode = (Ranks(fabric, name, mixed_layout(tp)) for name, tp in (("p", src_size), ("d", dst_size)))
    written: Counter[int] = Counter()
    fabric.on_write = lambda _peer, copies: written.update(
        at for dst, length in zip(copies.dst, copies.length, strict=True) for at in range(dst, dst + length, 4)
    )
    chunks = [TransferKVChunk(0, 2, 0, 3), TransferKVChunk(2, 3, 0, 3), TransferKVChunk(3, 5, 0, 3)]
    moved = []
    for rank, (pool, transport) in enumerate(zip(prefill.pools, prefill.transports, strict=True)):
        pool.fill()
        writer = open_shards(decode.registration(), prefill.layout, rank, pool, [transport])
        moved.append([writer.write_pages([chunk], [3, 4, 7], [8, 9, 1], 1.0)[0] for chunk in chunks])
    decode.check([8, 9, 1], [3, 4, 7], range(5))
    assert set(written.values()) == {1}
    by_layer = decode.layout.bytes_by_layer
    assert [sum(each) for each in zip(*moved, strict=True)] == [
        3 * dst_size * sum(by_layer[chunk.first_layer : chunk.end_layer]) for chunk in chunks
    ]
    assert by_layer[2] == 0


def test_whole_pages_still_move_as_runs_and_slices_move_page_by_page() -> None:
    fabric = FakeFabric()
    one, two = Ranks(fabric, "one", layout_of(4, 1)), Ranks(fabric, "two", layout_of(4, 2))
    whole = plan_page_copies(pair_regions(two.pools[0], two.pools[1]), [0, 1, 2], [5, 6, 7], range(2))
    assert list(whole.length) == [3 * two.pools[0].page_bytes[0]] * 2
    half = [PageSlice(0, 2 * HEAD_BYTES, 2 * HEAD_BYTES)] * (2 * NUM_LAYERS)
    sliced = plan_page_copies(pair_regions(two.pools[0], one.pools[0], half), [0, 1, 2], [5, 6, 7], range(2))
    assert list(sliced.length) == [2 * HEAD_BYTES] * 6
    with pytest.raises(TransferFailed, match="bytes from byte"):
        pair_regions(one.pools[0], two.pools[0], half)


def test_the_logits_row_goes_from_main_rank_to_main_rank() -> None:
    fabric = FakeFabric()
    prefill, decode = Ranks(fabric, "p", layout_of(2, 4)), Ranks(fabric, "d", layout_of(2, 2))
    prefill.pools[0].rows[1] = 9
    writer = open_shards(decode.registration(), prefill.layout, 0, prefill.pools[0], prefill.transports[:1])
    assert writer.write_aux(1, NUM_AUX - 1, 1.0) == AUX_ROW_BYTES
    assert (decode.pools[0].rows[-1] == 9).all() and (decode.pools[0].rows[0] == 255).all()


class Sealed:
    """A point that a row is complete behind; `pass_` completes it."""

    def __init__(self, pass_: Callable[[], None]) -> None:
        self.synchronize = pass_

    def wait(self, stream: object = None) -> None:
        self.synchronize()


@pytest.mark.parametrize("is_ordered", [False, True], ids=["the thread waits", "the device waits"])
def test_a_logits_row_that_a_device_is_still_sealing_leaves_sealed(is_ordered: bool) -> None:
    class Ordered(FakeTransport):
        def write_after(self, peer: PeerHandle, copies: CopyList, after: Sequence[Ready], timeout_s: float) -> None:
            assert (prefill.pools[0].rows[1] == 0).all(), "nobody has waited before the launch"
            for ready in after:
                ready.wait()
            self.write(peer, copies, timeout_s)

    fabric = FakeFabric()
    prefill, decode = Ranks(fabric, "p", layout_of(2, 1)), Ranks(fabric, "d", layout_of(2, 1))
    prefill.pools[0].rows[1] = 0
    transport = prefill.transports[0]
    if is_ordered:
        transport.__class__ = Ordered
    writer = open_shards(decode.registration(), prefill.layout, 0, prefill.pools[0], [transport])
    writer.write_aux(1, 0, 1.0, Sealed(lambda: prefill.pools[0].rows[1].fill(9)))
    assert (decode.pools[0].rows[0] == 9).all()


def test_tp_sizes_may_differ_but_must_fit_the_heads() -> None:
    check_compatible(layout_of(4, 2), layout_of(4, 8))
    check_compatible(layout_of(6, 3), layout_of(6, 2))
    for tp_size in (3, 0, -1, 6):
        with pytest.raises(IncompatibleLayout, match=f"4 KV heads cannot be cut for {tp_size} ranks"):
            check_compatible(layout_of(4, 2), layout_of(4, tp_size))


def test_a_registration_needs_sound_memory_of_every_rank() -> None:
    fabric = FakeFabric()
    prefill, decode = Ranks(fabric, "p", layout_of(4, 1)), Ranks(fabric, "d", layout_of(4, 2))
    info = decode.registration()
    assert check_registration(info, prefill.layout, prefill.pools[0]) == info.ranks[0]

    def refusal(*ranks: object) -> str:
        wrong = msgspec.structs.replace(info, ranks=ranks)
        with pytest.raises(BadFrame) as caught:
            check_registration(wrong, prefill.layout, prefill.pools[0])
        return caught.value.message

    main, other = info.ranks
    assert "1 ranks of memory for tp_size 2" in refusal(main)
    assert "2 ranks of memory for tp_size 2" in refusal(main, msgspec.structs.replace(other, tp_rank=0))
    whole = msgspec.structs.replace(other, page_bytes=(4 * HEAD_BYTES,) * (2 * NUM_LAYERS))
    assert f"page_bytes is {4 * HEAD_BYTES} there and {2 * HEAD_BYTES} here" in refusal(main, whole)
    assert "the ranks have [11, 12] pages" in refusal(main, msgspec.structs.replace(other, num_pages=11))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "words"),
    [(8, 4, 3, "8 attention heads"), (12, 4, 6, "4 KV heads"), (12, 6, 4, "6 KV heads"), (6, 2, 3, "2 KV heads")],
)
def test_what_cannot_be_cut_says_why(heads: int, kv_heads: int, tp_size: int, words: str) -> None:
    assert words in why_not(heads, kv_heads, tp_size)


@given(st.integers(1, 1000), st.integers(1, 16))
def test_shares_follow_each_other_and_differ_by_one_at_most(total: int, tp_size: int) -> None:
    shares = [share_of(total, tp_size, rank) for rank in range(tp_size)]
    assert [row for share in shares for row in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
