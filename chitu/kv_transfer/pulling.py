"""Features of images from E to P, by the protocol of KV from P to D: E is its P, and P its D. A unified instance gets
them as P does (`alone.py`).

A row of P's feature region is a page (`kv_cache/feature_pool.py`), so registration, announcement, writes, checksums,
deadlines, fences and quarantine are those of `sending.py` and `receiving.py`. P has its receiver beside its sender to
D, with a control port of its own (`InstanceInfo.image_port`). What is new is the order that says which image the rows
are for: `EncodeReceiver` repeats it until the room is over, `EncodeSender` gives it to the scheduler of E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from chitu.errors import BadFrame
from chitu.kv_transfer.both_sides import KVManagerConfig, OwnMemory, TransferContext, TransferEvent, TransferEventKind
from chitu.kv_transfer.peers import RegistrationState
from chitu.kv_transfer.ranks import FanOut
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.kv_transfer.sending import PrefillSender
from chitu.protocol import (
    IMAGE_KEY_BYTES,
    ClusterView,
    EncodeOrder,
    InstanceInfo,
    KVLayout,
    PeerMessage,
    RankMemory,
    encode,
)
from chitu.types import REGISTRATION_ROOM, Role, room_text

READERS = Role.PREFILL, Role.UNIFIED
"""Roles of instances that may have images encoded by E: those that compute prompts."""
ENDS = frozenset({TransferEventKind.SUCCESS, TransferEventKind.FAILED, TransferEventKind.RELEASED})


def feature_config(
    config: KVManagerConfig, layout: KVLayout, control_port: int, reader: Role = Role.PREFILL
) -> KVManagerConfig:
    """Return the configuration of either end of a transfer of features. All rows are verified: a row in a wrong place
    hardly shows in tokens. `reader`: role of the end that has them written to it, of those in `READERS`."""
    return replace(
        config,
        layout=layout,
        control_port=control_port,
        verify_kv="all",
        writer=Role.ENCODE,
        reader=reader,
        other_readers=tuple(role for role in READERS if role is not reader),
    )


class EncodeSender(PrefillSender):
    """E's side."""

    on_order: Callable[[bytes, EncodeOrder], None] | None = None
    """Takes an order, on the comm thread; set once, before frames come."""

    def _take(self, room: bytes, message: PeerMessage) -> None:
        if not isinstance(message, EncodeOrder):
            super()._take(room, message)
            return
        if len(room) != 16 or room == REGISTRATION_ROOM:
            raise BadFrame(f"an order in room {room_text(room)}")
        if len(message.key) != IMAGE_KEY_BYTES or message.num_rows < 1:
            raise BadFrame(f"an order of {message.num_rows} rows, with a key of {len(message.key)} bytes")
        if self.on_order is not None:
            self.on_order(room, message)


class EncodeReceiver(DecodeReceiver):
    """P's side."""

    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        context: TransferContext,
        followers: Sequence[RankMemory] = (),
    ) -> None:
        """`followers`: feature regions of ranks 1, 2, ...; E writes each row to all ranks."""
        super().__init__(config, memory, context, followers)
        self._send_frame = context.send_frame
        self.aux = memory.aux
        """Aux rows of the feature pool."""
        self.place = config.engine_rank, config.incarnation
        self._orders: dict[bytes, tuple[InstanceInfo, bytes]] = {}
        """By room: the E, and the encoded order. Under the lock."""
        self._orders_due_s = 0.0

    def encoders(self) -> list[InstanceInfo]:
        """Return the E that may be asked: registered with, heard, in the view, and not draining."""
        with self._lock:
            directory = self.machine.prefills
            silent = set(directory.silent())
            found = []
            for info in self._view.present():
                peer = directory.peer(info.engine_rank, info.incarnation)
                is_registered = peer is not None and peer.state is RegistrationState.ACCEPTED
                if is_registered and not info.draining and info.incarnation not in silent:
                    found.append(info)
            return found

    def order(self, room: bytes, encoder: InstanceInfo, order: EncodeOrder) -> None:
        """Send an order for a room that was announced to this E. Step thread."""
        frame = encode(order)
        with self._lock:
            if self.machine.table.get(room) is None:
                return  # it failed already
            self._orders[room] = encoder, frame
        self._send_frame(encoder.host, encoder.control_port, room, frame)

    def num_advances(self, room: bytes) -> int:
        """Return how often a room has advanced on its E, by E's word; 0 for one that is over. Step thread."""
        with self._lock:
            entry = self.machine.table.get(room)
            return entry.data.num_advances if entry is not None else 0

    def poll(self) -> list[TransferEvent]:
        events = super().poll()
        with self._lock:
            for event in events:
                if event.kind in ENDS:
                    self._orders.pop(event.room, None)
        return events

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if now_s < self._orders_due_s:
            return
        self._orders_due_s = now_s + self._config.deadlines.retry_interval_s
        with self._lock:
            for room in [room for room in self._orders if self.machine.table.get(room) is None]:
                del self._orders[room]
            again = [(info.host, info.control_port, room, frame) for room, (info, frame) in self._orders.items()]
        for frame_to in again:
            self._send_frame(*frame_to)


class PullingSender(PrefillSender):
    """P's side towards D, with that towards E."""

    def __init__(
        self,
        config: KVManagerConfig,
        memory: OwnMemory,
        context: TransferContext,
        fan_out: FanOut | None,
        images: EncodeReceiver,
    ) -> None:
        super().__init__(config, memory, context, fan_out)
        self.images = images

    def start(self) -> None:
        super().start()
        self.images.start()

    def close(self) -> None:
        super().close()
        self.images.close()

    def on_image_frame(self, room: bytes, payload: bytes) -> None:
        self.images.on_frame(room, payload)

    def on_view(self, view: ClusterView, router: int = 0) -> None:
        super().on_view(view, router)
        self.images.on_view(view, router)

    def on_silence(self, router: int) -> None:
        super().on_silence(router)
        self.images.on_silence(router)

    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        self.images.tick(now_s)
