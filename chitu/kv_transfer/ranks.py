"""Tensor parallelism of a transfer: the main rank orders (`rank_orders.py`), its followers write, sum up and copy their
own pages.

On P all ranks write pages and compute their checksums; on D, which writes nothing, they compute checksums
(`verify_kv`), as all do of features, which an E writes to each of them. If pages are kept in tiers, every rank copies
its own. The main rank sends an order to every follower, does its own part, then waits for all answers.

`FanOut` (main rank) owns the *lanes*: one socket per follower each. One thread at a time uses a lane, under its lock;
at the other end each follower has one thread per lane (`ShardFollower`), which owns its socket and processes its orders
one after the other. Lane 0 opens and closes peers (comm thread), lane 1 computes checksums (transfer threads, D's
verifying thread), lane 2 copies pages (`tiers`), the other lanes write and fence (transfer threads). A copy may take
longer than a checksum may wait, so they do not share a lane. The sockets lie in a folder that only this user can enter,
until all followers have connected. Invariant: all writes and fences of one D go through the same lane, which a follower
processes in order, so a fence that was answered comes after every earlier write, also after one whose answer the main
rank did not wait for.

An order that fails is answered with its error; only an unreadable order, which our own main rank cannot send, ends the
process.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import numpy as np
import zmq

from chitu.errors import ChituError, ConfigError, Internal, TransferFailed, from_code
from chitu.kv_cache.state_sums import StateSeals, reduced
from chitu.kv_cache.tiers.page_copies import PageCopies, page_content_bytes
from chitu.kv_transfer.layout import Int64s, PagedMemory, PageSums
from chitu.kv_transfer.rank_orders import (
    AnyOrder,
    ClosePeer,
    CopyShard,
    EndOrder,
    Fence,
    OpenPeer,
    Order,
    OrderAnswer,
    SealState,
    SumPages,
    WritePages,
    WriteState,
    answer_decoder,
    encoder,
    order_decoder,
)
from chitu.kv_transfer.shard_writer import ShardWriter, TransferKVChunk, open_shards, wait_for
from chitu.kv_transfer.transports.transport import Transport, WriteError
from chitu.protocol import KVArgsRegisterInfo, KVLayout, StateSeal, pack_i32, unpack_i32
from chitu.types import Ready

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
SUM_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
CONNECT_TIMEOUT_S = 60.0
SEND_TIMEOUT_MS = 1000
"""Time for which a socket blocks the sender if its follower does not read."""
MAX_POLL_MS = (1 << 31) - 1
"""Longest timeout of `poll`, some 24 days; a topology may have longer ones."""
MAX_SOCKET_PATH = 107
"""Longest path of a socket in bytes (Linux)."""
FOLDER_PREFIX = "chitu-lanes-"
HELLO = 0
"""Number of the unsolicited answer with which a follower reports that it has connected."""
T = TypeVar("T")


def lane_address(base: str, lane: int, tp_rank: int) -> str:
    return f"ipc://{base}/{lane}.{tp_rank}"


def make_lane_folder() -> str:
    """Create a folder of mode 0700, which keeps other users from the sockets in it. It lies in the temporary folder, or
    in /tmp if a socket's path would be too long there. Raises ConfigError if it cannot be created."""
    longest = MAX_SOCKET_PATH - len(os.fsencode(f"/{FOLDER_PREFIX}12345678/99.99"))
    parent = next((path for path in (tempfile.gettempdir(), "/tmp") if len(os.fsencode(path)) <= longest), None)
    try:
        return tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent)
    except OSError as error:
        raise ConfigError(f"no folder for the sockets between ranks: {error}; set TMPDIR to a short path") from error


@dataclass(slots=True, frozen=True)
class FanOutResult(Generic[T]):
    """Result of one order: our own outcome, and each follower's answer (None: it did not come in time)."""

    mine: T | ChituError
    answers: list[OrderAnswer | None]

    def failures(self) -> list[ChituError]:
        """Return everything that went wrong, our own failure first. A missing answer is unfenced."""
        found: list[ChituError] = [self.mine] if isinstance(self.mine, ChituError) else []
        for rank, answer in enumerate(self.answers, start=1):
            if answer is None:
                found.append(WriteError(f"TP rank {rank} did not answer", fenced=False))
            elif answer.code:
                text = f"TP rank {rank}: {answer.message}"
                is_unfenced = not answer.is_fenced
                found.append(WriteError(text, fenced=False) if is_unfenced else from_code(answer.code, text))
        return found


class Lane:
    """One socket per follower; the thread that holds the lock owns them all."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], base: str, number: int, num_followers: int) -> None:
        self._lock = threading.Lock()
        self._sockets: list[zmq.Socket[bytes]] = []
        for tp_rank in range(1, num_followers + 1):
            socket = context.socket(zmq.PAIR)
            socket.setsockopt(zmq.LINGER, 500)  # EndOrder is the last message
            socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            socket.bind(lane_address(base, number, tp_rank))
            self._sockets.append(socket)

    def order(self, order: Order, mine: Callable[[], T], timeout_s: float) -> FanOutResult[T]:
        """Send an order, run `mine`, collect the answers. Raises WriteError (fenced) if the lane stays busy."""
        if not self._lock.acquire(timeout=timeout_s):
            raise WriteError(f"the followers were busy for {timeout_s} s", fenced=True)
        try:
            deadline_s = time.monotonic() + timeout_s
            self._send(order)
            own = _attempt(mine)
            return FanOutResult(own, [_answer_to(order.number, socket, deadline_s) for socket in self._sockets])
        finally:
            self._lock.release()

    def wait_connected(self, deadline_s: float) -> bool:
        """Wait until all followers have connected, before the first order. Return False at the deadline."""
        return all(_answer_to(HELLO, socket, deadline_s) is not None for socket in self._sockets)

    def tell(self, order: Order) -> None:
        """Send an order that is not answered."""
        with self._lock:
            self._send(order)

    def close(self) -> bool:
        """End the followers' threads of this lane. Return False if a thread here does not release the lane."""
        if not self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            return False
        try:
            self._send(EndOrder(0))
            for socket in self._sockets:
                socket.close()
        finally:
            self._lock.release()
        return True

    def _send(self, order: Order) -> None:
        frame = encoder.encode(order)
        for tp_rank, socket in enumerate(self._sockets, start=1):
            try:
                socket.send(frame)
            except zmq.Again:  # the follower is dead, and so is the instance in a moment; its answer will be missing
                logger.warning("cannot send commands to TP rank %d: its socket is full", tp_rank)


def _attempt(call: Callable[[], T]) -> T | ChituError:
    try:
        return call()
    except ChituError as error:
        return error


def _answer_to(number: int, socket: zmq.Socket[bytes], deadline_s: float) -> OrderAnswer | None:
    while socket.poll(min(max(0, round(1000 * (deadline_s - time.monotonic()))), MAX_POLL_MS)):
        try:
            answer = answer_decoder.decode(socket.recv())
        except msgspec.DecodeError as error:
            logger.error("cannot decode a follower's answer: %s", error)
            continue
        if answer.number == number:
            return answer
    return None


class TPDecodeWriter:
    """Implements `DecodeWriter` for the main rank of several: writes its shard, and has the followers write theirs."""

    def __init__(self, fan_out: FanOut, own: ShardWriter, lane: Lane, incarnation: int) -> None:
        self._fan_out = fan_out
        self._own = own
        self._lane = lane
        self._incarnation = incarnation

    @property
    def transport(self) -> str:
        return self._own.transport

    @property
    def way(self) -> str:
        return self._own.way

    def write_pages(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int], timeout_s: float
    ) -> tuple[int, ...]:
        wait_for(chunks)  # what is ready here is ready on the followers, which cannot see our events
        pages = src_pages, dst_pages
        order = WritePages.of(self._fan_out.next_number(), self._incarnation, timeout_s, chunks, *pages)
        return self._write(order, lambda: self._own.write_pages(chunks, *pages, timeout_s), timeout_s)

    def write_aux(self, src_slot: int, dst_slot: int, timeout_s: float, ready: Ready | None = None) -> int:
        return self._own.write_aux(src_slot, dst_slot, timeout_s, ready)

    def write_state(self, src_slot: int, dst_slot: int, timeout_s: float) -> tuple[int, ...]:
        order = WriteState(self._fan_out.next_number(), self._incarnation, timeout_s, src_slot, dst_slot)
        return self._write(order, lambda: self._own.write_state(src_slot, dst_slot, timeout_s), timeout_s)

    def _write(self, order: Order, mine: Callable[[], tuple[int, ...]], timeout_s: float) -> tuple[int, ...]:
        """Have all ranks write, and return the bytes of each."""
        result = self._lane.order(order, mine, timeout_s + self._fan_out.answer_grace_s)
        failures = result.failures()
        if failures:
            text = "; ".join(error.message for error in failures)
            is_fenced = all(error.fenced for error in failures if isinstance(error, WriteError))
            raise WriteError(text, fenced=is_fenced)
        assert not isinstance(result.mine, ChituError)
        return (*result.mine, *(answer.nbytes for answer in result.answers if answer is not None))

    def buffer_lengths(
        self, chunks: Sequence[TransferKVChunk], src_pages: Sequence[int], dst_pages: Sequence[int]
    ) -> list[int]:
        return self._own.buffer_lengths(chunks, src_pages, dst_pages)

    def fence(self, timeout_s: float) -> bool:
        order = Fence(self._fan_out.next_number(), self._incarnation, timeout_s)
        wait_s = timeout_s + self._fan_out.answer_grace_s
        result = self._lane.order(order, lambda: self._own.fence(timeout_s), wait_s)
        failures = result.failures()
        if failures:
            raise TransferFailed("; ".join(error.message for error in failures))
        return result.mine is True and all(answer is not None and answer.is_fenced for answer in result.answers)

    def close(self) -> None:
        self._own.close()
        self._fan_out.forget(self._incarnation)


class TPPageSums:
    """Implements `PageSums` for the main rank of several: the checksums of all ranks, added up. `of_features`: of their
    feature regions."""

    def __init__(self, fan_out: FanOut, own: PageSums, of_features: bool = False) -> None:
        self._fan_out = fan_out
        self._own = own
        self._of_features = of_features

    def sums(self, layers: range, pages: Sequence[int]) -> Int64s:
        place = layers.start, layers.stop
        order = SumPages(self._fan_out.next_number(), *place, pack_i32(pages), self._of_features)
        result = self._fan_out.sum_lane.order(order, lambda: self._own.sums(layers, pages), SUM_TIMEOUT_S)
        failures = result.failures()
        if failures:
            raise TransferFailed("; ".join(error.message for error in failures))
        assert not isinstance(result.mine, ChituError)
        theirs = [np.frombuffer(answer.sums, dtype=np.int64) for answer in result.answers if answer is not None]
        if any(len(sums_N) != len(pages) for sums_N in theirs):
            raise TransferFailed(f"sums of {[len(sums_N) for sums_N in theirs]} pages for {len(pages)}")
        totals_N: Int64s = np.sum([result.mine, *theirs], axis=0, dtype=np.int64)
        return totals_N


class TPStateSeals:
    """Implements `StateSeals` for the main rank of several: the stamp of all ranks and the sum of their checksums.

    `has_stamps`: P requires equal stamps; rows of D have none, as P writes them.
    """

    def __init__(self, fan_out: FanOut, own: StateSeals, has_stamps: bool) -> None:
        self._fan_out = fan_out
        self._own = own
        self._has_stamps = has_stamps

    def seal(self, slot: int) -> StateSeal:
        order = SealState(self._fan_out.next_number(), slot)
        result = self._fan_out.sum_lane.order(order, lambda: self._own.seal(slot), SUM_TIMEOUT_S)
        failures = result.failures()
        if failures:
            raise TransferFailed("; ".join(error.message for error in failures))
        assert isinstance(result.mine, StateSeal)
        seals = [result.mine, *(answer.seal for answer in result.answers if answer is not None and answer.seal)]
        stamps = {(seal.num_tokens, seal.digest) for seal in seals}
        if len(seals) != 1 + len(result.answers) or (self._has_stamps and len(stamps) > 1):
            raise TransferFailed(f"the ranks' parts of state row {slot} differ in their tokens: {seals}")
        return StateSeal(result.mine.num_tokens, result.mine.digest, reduced(sum(seal.sum for seal in seals)))


class TPPageCopies:
    """Implements `PageCopies` for the main rank of several; each rank copies the heads that it holds. `memory`: shared
    by all ranks; contents lie in it. Raises Internal if a rank takes longer than `timeout_s`: it is unknown then what
    that rank may still copy, and where to."""

    def __init__(self, fan_out: FanOut, own: PageCopies, memory: memoryview, timeout_s: float) -> None:
        self._fan_out = fan_out
        self._own = own
        self._timeout_s = timeout_s
        self._base = _address_of(memory)

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        self._copy(page, content, is_restore=False)

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        self._copy(page, content, is_restore=True)

    def _copy(self, page: int, content: memoryview, is_restore: bool) -> None:
        order = CopyShard(self._fan_out.next_number(), page, _address_of(content) - self._base, is_restore)
        copy = self._own.restore_to_kvpool if is_restore else self._own.extract_from_kvpool
        failures = self._fan_out.copy_lane.order(order, lambda: copy(page, content), self._timeout_s).failures()
        if failures:
            raise Internal("; ".join(error.message for error in failures))


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class FanOut:
    """Lanes from a main rank to its followers. Built before the followers start; they need `base` and `num_lanes`.

    `transfer_threads`: their number on P; 0 on D. `answer_grace_s`: how much longer an answer may take than the timeout
    of its work.
    """

    def __init__(self, num_followers: int, transfer_threads: int, answer_grace_s: float = 1.0) -> None:
        self.answer_grace_s = answer_grace_s
        self.num_lanes = 3 + transfer_threads
        self.base = make_lane_folder()
        self.num_followers = num_followers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lanes = [Lane(self._context, self.base, number, num_followers) for number in range(self.num_lanes)]
        self._control, self.sum_lane, self.copy_lane, *self._data = self._lanes
        self._numbers = itertools.count(1)
        self._num_opened = 0

    def wait_connected(self) -> None:
        """Wait until every follower has connected, then remove the sockets' names: no other process can connect, and a
        killed process leaves nothing behind. Raises Internal if a follower does not connect."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        if not all(lane.wait_connected(deadline_s) for lane in self._lanes):
            raise Internal(f"a TP rank did not connect within {CONNECT_TIMEOUT_S:g} s")
        shutil.rmtree(self.base, ignore_errors=True)

    def open(self, info: KVArgsRegisterInfo, open_own: Callable[[], ShardWriter]) -> TPDecodeWriter:
        """Connect all ranks to a D. Comm thread. Raises TransferFailed with the reasons of the ranks that could not."""
        result = self._control.order(OpenPeer(self.next_number(), info), open_own, OPEN_TIMEOUT_S)
        failures = result.failures()
        if failures:
            self.forget(info.incarnation)
            if isinstance(result.mine, ShardWriter):
                result.mine.close()
            raise TransferFailed("; ".join(error.message for error in failures))
        assert isinstance(result.mine, ShardWriter)
        lane = self._data[self._num_opened % len(self._data)]
        self._num_opened += 1
        return TPDecodeWriter(self, result.mine, lane, info.incarnation)

    def forget(self, incarnation: int) -> None:
        """Have the followers close their side of a D that is gone. Comm thread."""
        self._control.tell(ClosePeer(self.next_number(), incarnation))

    def next_number(self) -> int:
        return next(self._numbers)

    def close(self) -> None:
        """End the followers' lane threads. No transfer thread may run any more."""
        if all([lane.close() for lane in self._lanes]):
            self._context.term()
        shutil.rmtree(self.base, ignore_errors=True)


@dataclass(slots=True, frozen=True)
class TierMemory:
    """Memory in which the main rank keeps pages, and the copies between it and our own pool."""

    memory: memoryview
    copies: PageCopies


class ShardFollower:
    """Lane threads of a follower. `base`, `num_lanes`: of the main rank's `FanOut`. `memory` is registered already."""

    def __init__(
        self,
        layout: KVLayout,
        tp_rank: int,
        memory: PagedMemory,
        transports: Sequence[Transport],
        base: str,
        num_lanes: int,
        page_sums: PageSums | None = None,
        tiers: TierMemory | None = None,
        state_seals: StateSeals | None = None,
        feature_sums: PageSums | None = None,
    ) -> None:
        """`feature_sums`: of this rank's feature region, if it has one."""
        self._layout = layout
        self._tp_rank = tp_rank
        self._memory = memory
        self._transports = transports
        self._page_sums = page_sums
        self._tiers = tiers
        self._state_seals = state_seals
        self._feature_sums = feature_sums
        self._writers: dict[int, ShardWriter] = {}
        """Writers by D's incarnation; lane 0 changes it, the other lanes look up."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._addresses = [lane_address(base, lane, tp_rank) for lane in range(num_lanes)]
        self._threads: list[threading.Thread] = []

    def start(self, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        """Start a thread per lane. `spawn(name, target)` makes a thread whose death must end the process."""
        for number, address in enumerate(self._addresses):
            thread = spawn(f"lane-{number}", lambda address=address: self._serve(address))  # type: ignore[misc]
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Join the lane threads, after the main rank ended the lanes. The transports may be closed then."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning("%s did not stop writing within %g s", thread.name, timeout_s)
        for writer in self._writers.values():
            writer.close()

    def _serve(self, address: str) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(encoder.encode(OrderAnswer(HELLO)))
        while True:
            order = order_decoder.decode(socket.recv())
            if isinstance(order, EndOrder):
                break
            answer = self._obey(order)
            if answer is not None:
                socket.send(encoder.encode(answer))
        socket.close()

    def _obey(self, order: AnyOrder) -> OrderAnswer | None:
        try:
            if isinstance(order, OpenPeer):
                self._open(order)
                return OrderAnswer(order.number)
            if isinstance(order, ClosePeer):
                self._close(order.incarnation)
                return None
            if isinstance(order, WritePages):
                writer = self._writer(order.incarnation)
                chunks = [TransferKVChunk(*chunk) for chunk in order.chunks]
                pages = unpack_i32(order.src_pages), unpack_i32(order.dst_pages)
                (nbytes,) = writer.write_pages(chunks, *pages, order.timeout_s)
                return OrderAnswer(order.number, nbytes)
            if isinstance(order, WriteState):
                writer = self._writer(order.incarnation)
                (nbytes,) = writer.write_state(order.src_slot, order.dst_slot, order.timeout_s)
                return OrderAnswer(order.number, nbytes)
            if isinstance(order, SealState):
                assert self._state_seals is not None, "the layout has state on every rank"
                return OrderAnswer(order.number, seal=self._state_seals.seal(order.slot))
            if isinstance(order, SumPages):
                return OrderAnswer(order.number, sums=self._sum(order).tobytes())
            if isinstance(order, CopyShard):
                self._copy(order)
                return OrderAnswer(order.number)
            assert isinstance(order, Fence)
            return OrderAnswer(order.number, is_fenced=self._writer(order.incarnation).fence(order.timeout_s))
        except ChituError as error:
            is_fenced = not isinstance(error, WriteError) or error.fenced
            return OrderAnswer(order.number, is_fenced=is_fenced, code=error.code, message=error.message)

    def _sum(self, order: SumPages) -> Int64s:
        page_sums = self._feature_sums if order.of_features else self._page_sums
        if page_sums is None:
            what = "features of images" if order.of_features else "verify_kv"
            raise TransferFailed(f"TP rank {self._tp_rank} was not set up for {what}")
        return page_sums.sums(range(order.first_layer, order.end_layer), unpack_i32(order.pages))

    def _copy(self, order: CopyShard) -> None:
        assert self._tiers is not None, "the main rank has tiers by the same topology"
        content = self._tiers.memory[order.offset : order.offset + page_content_bytes(self._layout)]
        copies = self._tiers.copies
        copy = copies.restore_to_kvpool if order.is_restore else copies.extract_from_kvpool
        copy(order.page, content)

    def _open(self, order: OpenPeer) -> None:
        info = order.info
        self._close(info.incarnation)  # D may have been lost and come back
        self._writers[info.incarnation] = open_shards(info, self._layout, self._tp_rank, self._memory, self._transports)

    def _close(self, incarnation: int) -> None:
        writer = self._writers.pop(incarnation, None)
        if writer is not None:
            writer.close()

    def _writer(self, incarnation: int) -> ShardWriter:
        writer = self._writers.get(incarnation)
        if writer is None:
            raise TransferFailed(f"TP rank {self._tp_rank} has no connection to D's incarnation {incarnation}")
        return writer
