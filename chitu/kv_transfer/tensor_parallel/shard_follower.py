"""A TP follower in the transfer layer: on orders of the main rank it writes its shard of P, computes checksums and
copies pages.

One thread per lane of the main rank (`fan_out.py`); each owns its socket and processes its orders one after the other.
A follower has no rooms and no requests: an order names pages, layers and the incarnation of D. On D there is nothing to
write, only checksums to compute (`verify_kv`). An order that fails is answered with its error; only an unreadable
order, which our own main rank cannot send, ends the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from chitu.errors import ChituError, TransferFailed
from chitu.kv_cache.tiers.page_copies import PageCopies, page_content_bytes
from chitu.kv_transfer.checksums import PageSums
from chitu.kv_transfer.layout import PagedMemory
from chitu.kv_transfer.tensor_parallel.fan_out import HELLO, lane_address
from chitu.kv_transfer.tensor_parallel.orders import (
    AnyOrder,
    ClosePeer,
    CopyShard,
    EndOrder,
    OpenPeer,
    OrderAnswer,
    Settle,
    SumPages,
    WritePages,
    encoder,
    order_decoder,
    unpack_moves,
)
from chitu.kv_transfer.tensor_parallel.shard_writer import ShardWriter, open_shards
from chitu.kv_transfer.transports.transport import Transport, WriteError
from chitu.protocol import KVLayout, unpack_i32

logger = logging.getLogger(__name__)


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
    ) -> None:
        self._layout = layout
        self._tp_rank = tp_rank
        self._memory = memory
        self._transports = transports
        self._page_sums = page_sums
        self._tiers = tiers
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
                (nbytes,) = writer.write_pages(unpack_moves(order.moves), order.timeout_s)
                return OrderAnswer(order.number, nbytes)
            if isinstance(order, SumPages):
                if self._page_sums is None:
                    raise TransferFailed(f"TP rank {self._tp_rank} was not set up for verify_kv")
                sums = self._page_sums.sums(range(order.first_layer, order.end_layer), unpack_i32(order.pages))
                return OrderAnswer(order.number, sums=sums.tobytes())
            if isinstance(order, CopyShard):
                self._copy(order)
                return OrderAnswer(order.number)
            assert isinstance(order, Settle)
            return OrderAnswer(order.number, is_settled=self._writer(order.incarnation).settle(order.timeout_s))
        except ChituError as error:
            is_settled = not isinstance(error, WriteError) or error.settled
            return OrderAnswer(order.number, is_settled=is_settled, code=error.code, message=error.message)

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
