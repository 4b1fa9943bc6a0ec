"""`SimulatedEncoder`: an E in virtual time, which serves one image after the other, and the end of it at a P.

The E is a server of measured speed with the store of a real one (`FeatureStore`). It joins the routers and reports its
load as a real one, so that they choose between E. P's side is real (`instance/image_pulls.py`) but for the transfer:
`EncodedFeatures` takes the place of the receiver. Nothing fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from chitu.errors import ChituError
from chitu.instance.image_load import ImageMeter
from chitu.instance.image_source import PreparedImage
from chitu.instance.images import FeatureStore
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.protocol import (
    FEATURE_MARK_BYTES,
    IMAGE_KEY_BYTES,
    PROTOCOL_VERSION,
    EncodeOrder,
    Heartbeat,
    ImageLoad,
    InstanceInfo,
    Join,
    KVLayout,
    LoadReport,
)
from chitu.simulation.events import VirtualClock
from chitu.simulation.profile import EngineProfile
from chitu.types import Role

NAME_BYTES = IMAGE_KEY_BYTES + FEATURE_MARK_BYTES
"""Of an aux row: which image the features are of, and which weights, of which there are no others here."""
NUM_AUX = 64
"""Images that may be on their way to a P."""


class EncoderWorld(Protocol):
    """What an E, and a P that asks it, need of the world."""

    message_s: float
    encoders: list[SimulatedEncoder]

    @property
    def clock(self) -> VirtualClock: ...

    def at(self, when_s: float, act: Callable[..., object], *values: object) -> None: ...

    def tell_routers(self, message: Join | Heartbeat) -> None:
        """Hand a message to all routers, after the usual time."""
        ...


class SimulatedEncoder:
    def __init__(self, world: EncoderWorld, rank: int, incarnation: int, profile: EngineProfile, beat_s: float) -> None:
        self._world, self._cost, self._beat_s = world, profile.images, beat_s
        layout = features_of(profile)
        host, length = "simulated", profile.max_model_len
        self.info = InstanceInfo(
            *(Role.ENCODE, rank, incarnation, host, 1, 1, layout, length, incarnation), protocol=PROTOCOL_VERSION
        )
        self.store = FeatureStore(profile.images.region_rows)
        self._moved_row_s = profile.images.row_bytes / profile.link.bytes_per_s
        self._meter = ImageMeter(world.clock)
        self._free_s = self.busy_s = 0.0
        self._waiting_rows = self.num_images = self._num_rows = self._num_hits = 0
        world.tell_routers(Join(PROTOCOL_VERSION, self.info))
        world.at(world.clock.now_s, self._beat)

    def encode(self, order: EncodeOrder, deliver: Callable[[], object]) -> None:
        """Encode an image once those before it are, unless it is here, and call `deliver` when its features are at the
        P that wants them."""
        now_s, rows, moved_s = self._world.clock.now_s, order.num_rows, order.num_rows * self._moved_row_s
        image = self.store.find(order.key)
        if image is not None:
            self._num_hits += 1
            self._world.at(now_s + moved_s, deliver)
            return
        self._waiting_rows += rows
        self._meter.note(True)
        seconds = rows * self._cost.row_s
        self._free_s = max(self._free_s, now_s) + seconds
        self.busy_s += seconds
        self._world.at(self._free_s, self._encoded, order, deliver, moved_s)

    def _encoded(self, order: EncodeOrder, deliver: Callable[[], object], moved_s: float) -> None:
        self.store.reserve(order.key, order.num_rows)
        self._waiting_rows -= order.num_rows
        self.num_images += 1
        self._num_rows += order.num_rows
        self._meter.note_encoded(order.num_rows)
        self._meter.note(self._waiting_rows > 0)
        self._world.at(self._world.clock.now_s + moved_s, deliver)

    def _beat(self) -> None:
        info, keys = self.info, self.store.newest_keys
        self._meter.note(self._waiting_rows > 0)
        load = LoadReport(
            waiting_tokens=self._waiting_rows,
            tokens=self._num_rows,
            images=self.num_images,
            image_rows=self.store.num_rows,
            backlog_s=self._meter.busy_s,
            backlog_work=self._num_rows,
            image_load=ImageLoad(self._waiting_rows, self._meter.row_s, self._num_hits, keys),
        )
        self._world.tell_routers(Heartbeat(info.role, info.engine_rank, info.incarnation, load))
        self._world.at(self._world.clock.now_s + self._beat_s, self._beat)


def features_of(profile: EngineProfile) -> KVLayout:
    """Return the layout of features of the profile's model."""
    width = max(1, round(profile.images.row_bytes / 4))
    return KVLayout.uniform("simulated", 1, 1, width, 1, "float32", NAME_BYTES // 4, regions_per_layer=1)


@dataclass(slots=True)
class EncodedFeatures:
    """What E write to a P (`FeatureReceiver`)."""

    world: EncoderWorld
    wake: Callable[[], object]
    """Wakes the step thread of P."""
    rows: np.ndarray = field(default_factory=lambda: np.zeros((NUM_AUX, AUX_HEADER_BYTES + NAME_BYTES), np.uint8))
    aux: MetadataBuffers = field(init=False)
    _slots: dict[bytes, int] = field(default_factory=dict)
    """Aux row of each room."""
    _events: list[TransferEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.aux = MetadataBuffers(self.rows, NAME_BYTES)

    def encoders(self) -> list[InstanceInfo]:
        return [each.info for each in self.world.encoders]

    def announce(
        self,
        room: bytes,
        request_id: str,
        pages: Sequence[int],
        aux_slot: int,
        num_tokens: int,
        prefill_rank: int,
        prefill_incarnation: int,
        prefix_pages: int,
    ) -> None:
        self._slots[room] = aux_slot

    def order(self, room: bytes, encoder: InstanceInfo, order: EncodeOrder) -> None:
        chosen = next(each for each in self.world.encoders if each.info.incarnation == encoder.incarnation)
        when_s = self.world.clock.now_s + self.world.message_s
        self.world.at(when_s, chosen.encode, order, lambda: self._arrive(room, order.key))

    def _arrive(self, room: bytes, key: bytes) -> None:
        if (slot := self._slots.pop(room, None)) is not None:
            self.rows[slot, AUX_HEADER_BYTES : AUX_HEADER_BYTES + IMAGE_KEY_BYTES] = np.frombuffer(key, np.uint8)
            self._events.append(TransferEvent(TransferEventKind.SUCCESS, room))
            self.wake()

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def num_advances(self, room: bytes) -> int:
        """Return the seconds since the start: no E is silent."""
        return int(self.world.clock.now_s) if room in self._slots else 0

    def abort(self, room: bytes, error: ChituError) -> None:
        if self._slots.pop(room, None) is not None:
            self._events.append(TransferEvent(TransferEventKind.RELEASED, room))


class PreparedAtOnce:
    """Images for an instance that encodes itself: preparing them is in the time of its rows (`ImageSource`)."""

    num_signs = 0

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake` wakes the step thread."""
        self._ready: dict[bytes, None] = {}
        self._wake = wake

    def ask(self, key: bytes, router: int) -> None:
        self._ready[key] = None
        self._wake()

    def take(self) -> list[PreparedImage]:
        ready, self._ready = self._ready, {}
        return [PreparedImage(key, "prepared") for key in ready]

    def drop(self, key: bytes) -> None:
        self._ready.pop(key, None)
