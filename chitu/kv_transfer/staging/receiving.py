"""D's staged half in one piece: `StagedArrivals` under the receiver's lock, `Scatterer` beside it.

Made and owned by `DecodeReceiver`, whose lock and outbox it uses; `arrived` comes from the comm thread, the rest from
the scattering thread. The lock is never held across a copy or a checksum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from chitu.errors import ChituError
from chitu.kv_transfer.parts import KVManagerConfig, RoleParts, TransferOutbox
from chitu.kv_transfer.receiver.prefill_directory import PrefillDirectory
from chitu.kv_transfer.receiver.receive_rooms import ReceiveRoom, ReceiveRooms
from chitu.kv_transfer.staging.arrivals import Scatter, StagedArrivals, StagedGroup
from chitu.kv_transfer.staging.scatterer import Scatterer
from chitu.net.job_thread import JobThread
from chitu.protocol import Staged


@dataclass(slots=True, frozen=True)
class Receiver:
    """What of `DecodeReceiver` is used here."""

    lock: threading.Lock
    empty_outbox: Callable[[], None]
    """Without the lock."""
    verify_logits: Callable[[bytes, ReceiveRoom], ChituError | None]
    """Whether a room's logits row is what P sealed. Without the lock."""


class StagedReceiving:
    """Implements `ScatterRooms`. `scatterer` is started and closed by the owner."""

    def __init__(self, receiver: Receiver, arrivals: StagedArrivals) -> None:
        self._receiver = receiver
        self._arrivals = arrivals
        self.scatterer: JobThread[StagedGroup]

    @classmethod
    def of(
        cls,
        receiver: Receiver,
        config: KVManagerConfig,
        parts: RoleParts,
        rooms: ReceiveRooms,
        directory: PrefillDirectory,
        out: TransferOutbox,
    ) -> StagedReceiving | None:
        """None: no P may stage."""
        staging = parts.staging
        if staging is None or staging.area is None or not config.staging_prefills:
            return None
        memory, area = parts.memory, staging.area
        receiving = cls(receiver, StagedArrivals(config, memory, area, directory.grants, rooms, directory, out))
        scatterer = Scatterer(receiving, memory, area, staging.copier, config.layout.regions_per_layer)
        receiving.scatterer = JobThread("scatter", scatterer.scatter)
        return receiving

    def arrived(self, room: bytes, message: Staged) -> None:
        """A group lies in a segment. Raises BadFrame."""
        with self._receiver.lock:
            group = self._arrivals.arrived(room, message)
        if group is not None:
            self.scatterer.put(group)

    def begin_scatter(self, group: StagedGroup) -> Scatter | None:
        with self._receiver.lock:
            scatter = self._arrivals.begin(group)
        if scatter is None:
            self._receiver.empty_outbox()
        return scatter

    def verify_row(self, scatter: Scatter) -> ChituError | None:
        return self._receiver.verify_logits(scatter.group.room, scatter.entry.data)

    def end_scatter(self, scatter: Scatter, error: ChituError | None) -> None:
        with self._receiver.lock:
            self._arrivals.end(scatter, error)
        self._receiver.empty_outbox()
