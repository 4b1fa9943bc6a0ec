"""D's look at the KV that arrived (`verify_kv`), before the scheduler may use it: its own queue and its own thread.

Owned by `DecodeReceiver`. The comm thread puts an `Arrival` in when P said Success; the `verify` thread sums up its
pages and hands the verdict to `decide`. Neither the comm thread (heartbeats, acknowledgements) nor the step thread
waits for it, and no lock is held. A room may end while its arrival waits here (deadline, client gone): the verdict then
comes to nothing, and reading pages that another request owns by then does no harm. Without `start`, `run_one` pumps
(tests).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from chitu.errors import ChituError
from chitu.kv_transfer.checksums import PageSums, RoomSums, compare, head_copies
from chitu.kv_transfer.receive_rooms import ReceiveEntry
from chitu.messages import KVLayout, PrefillTimes

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Arrival:
    """A room whose last byte is here."""

    room: bytes
    entry: ReceiveEntry
    pages: list[int]
    """Ours, one for each of `expected`."""
    expected: RoomSums
    moved_bytes: int
    times: PrefillTimes


class KVVerifier:
    """`decide(arrival, error)` is called without a lock; `error` None: every sum is right."""

    def __init__(
        self, page_sums: PageSums, layout: KVLayout, decide: Callable[[Arrival, ChituError | None], None]
    ) -> None:
        self._page_sums = page_sums
        self._layers = range(layout.num_layers)
        self._copies = head_copies(layout)
        self._decide = decide
        self._waiting: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, arrival: Arrival) -> None:
        self._waiting.put(arrival)

    def start(self, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        """`spawn(name, target)` makes a thread whose death must end the process."""
        self._thread = spawn("verify", self._loop)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """After the arrivals that wait. A thread that does not come back in time is reported."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s still works after %g s", self._thread.name, timeout_s)

    def run_one(self) -> bool:
        """Verify one room in this thread; False where none waits."""
        try:
            arrival = self._waiting.get_nowait()
        except queue.Empty:
            return False
        if arrival is not None:
            self._verify(arrival)
        return arrival is not None

    def _loop(self) -> None:
        while (arrival := self._waiting.get()) is not None:
            self._verify(arrival)

    def _verify(self, arrival: Arrival) -> None:
        error: ChituError | None = None
        try:
            compare(arrival.expected, self._page_sums.sums(self._layers, arrival.pages), self._copies)
        except ChituError as failure:
            error = failure
        self._decide(arrival, error)
