"""Events of the transfer layer for the step thread, and what the machines of both sides share.

`KVManager` picks one role object at construction: `PrefillSender` or `DecodeReceiver`. The step thread calls its
methods and drains `poll()`; the comm thread feeds `on_frame`, `on_view` and `tick`; transfer threads do the writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from chitu.errors import ChituError
from chitu.protocol import NO_TIMES, PrefillTimes, TransferSums, Wire


class TransferEventKind(Enum):
    ANNOUNCED = auto()
    """P: TransferInfo came; the room's pages on D are reserved, so what is computed now can always be delivered."""
    LOGITS_READY = auto()
    """D: the aux row is complete and verified; token 1 can be sampled. Always before SUCCESS."""
    SUCCESS = auto()
    """P: everything was written. D: KV is here; the pages and the aux slot belong to the request again."""
    FAILED = auto()
    """The room failed, with `error` as the cause. Its pages stay quarantined until RELEASED."""
    RELEASED = auto()
    """After FAILED or `abort`: nothing reads (P) or writes (D) the room's pages and aux slot any more."""


@dataclass(slots=True, frozen=True)
class TransferEvent:
    kind: TransferEventKind
    room: bytes
    error: ChituError | None = None
    """Cause of a FAILED event; None for every other kind."""
    kv_bytes: int = 0
    """Bytes moved (KV and logits), with SUCCESS."""
    saved_bytes: int = 0
    """KV bytes of the prompt that D had already, with SUCCESS on D."""
    times: PrefillTimes = NO_TIMES
    """Durations on P, with SUCCESS on D."""
    cached_tokens: int = 0
    """Prompt tokens that P did not have to compute, with LOGITS_READY on D."""
    prompt_logprobs: bytes | None = None
    """Logprobs of the prompt, with SUCCESS on D, if they were requested."""
    sums: TransferSums | None = None
    """Checksums of the pages on both sides, with SUCCESS on D, if they were requested."""


class Aborted(NamedTuple):
    """The scheduler aborts a room (either machine). Only RELEASED follows; events that were not polled yet are dropped.
    D emits one more RELEASED, at once, for an unknown room."""

    room: bytes
    error: ChituError


class ViewChanged(NamedTuple):
    """The members of `PeerView` changed, or one was seen to end (either machine)."""


class Tick(NamedTuple):
    """Time has passed (either machine)."""


class DropEvents(NamedTuple):
    """Drop the events of a room that the step thread has not polled, except RELEASED (either machine). P emits RELEASED
    if SUCCESS was among them."""

    room: bytes


class Send(NamedTuple):
    """Send a frame (either machine)."""

    host: str
    port: int
    room: bytes
    message: Wire


@dataclass(slots=True, frozen=True)
class KVChunk:
    """Tokens `[start, end)` of a room are computed in this step; `pages` is the room's whole page list so far."""

    room: bytes
    pages: Sequence[int]
    start: int
    end: int


class PeerLink(Protocol):
    """Queue of outgoing P<->D frames, which the comm thread empties. Never blocks."""

    def __call__(self, host: str, port: int, room: bytes, payload: bytes) -> None: ...


Wake = Callable[[], None]
"""Function that wakes the step thread after an event was queued. Any thread, never blocks."""
