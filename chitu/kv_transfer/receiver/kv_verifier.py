"""D's look at the KV that arrived (`verify_kv`), before the scheduler may use it.

Owned by `DecodeReceiver`, called by its `verify` thread (`job_thread.py`). The comm thread puts an `Arrival` in its
queue when P said Success; the pages are summed up and `decide` gets the verdict. Neither the comm thread (heartbeats,
acknowledgements) nor the step thread waits for it, and no lock is held. A room may end while its arrival waits
(deadline, client gone): the verdict then comes to nothing, and reading pages that another request owns by then does no
harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chitu.errors import ChituError
from chitu.kv_transfer.checksums import PageSums, RoomSums, compare, head_copies
from chitu.kv_transfer.receiver.receive_rooms import ReceiveEntry
from chitu.protocol import KVLayout, PrefillTimes


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

    def verify(self, arrival: Arrival) -> None:
        error: ChituError | None = None
        try:
            compare(arrival.expected, self._page_sums.sums(self._layers, arrival.pages), self._copies)
        except ChituError as failure:
            error = failure
        self._decide(arrival, error)
