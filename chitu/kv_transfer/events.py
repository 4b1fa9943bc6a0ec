"""What the transfer layer tells the step thread, the thin interfaces between the two, and what both machines share.

`KVManager` picks one role object at construction: `PrefillSender` or `DecodeReceiver`. The step thread calls its
methods and drains `poll()`; the comm thread feeds `on_frame`, `on_view` and `tick`; transfer threads do the writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from chitu.errors import ChituError
from chitu.protocol import NO_TIMES, ClusterView, PrefillTimes, Wire
from chitu.types import Ready


class TransferEventKind(Enum):
    ANNOUNCED = auto()
    """P: TransferInfo came; the room's pages on D are reserved, so computing it now can always be delivered."""
    LOGITS_READY = auto()
    """D: the aux row is complete and verified; token 1 can be sampled. Always before SUCCESS."""
    SUCCESS = auto()
    """P: everything was written. D: KV is here; the pages and the aux slot belong to the request again."""
    FAILED = auto()
    """The room is dead; `error` says why. Its pages stay quarantined until RELEASED."""
    RELEASED = auto()
    """After FAILED or `abort`: nothing reads (P) or writes (D) the room's pages and aux slot any more."""


@dataclass(slots=True, frozen=True)
class TransferEvent:
    kind: TransferEventKind
    room: bytes
    error: ChituError | None = None
    """With FAILED, and only there."""
    kv_bytes: int = 0
    """With SUCCESS: bytes moved (KV and logits)."""
    saved_bytes: int = 0
    """D, with SUCCESS: KV bytes of the prompt that were here already."""
    times: PrefillTimes = NO_TIMES
    """D, with SUCCESS: where P spent its time."""
    cached_tokens: int = 0
    """D, with LOGITS_READY: of the prompt, that P did not have to compute."""
    prompt_logprobs: bytes | None = None
    """D, with SUCCESS, where P was asked for them."""


class Aborted(NamedTuple):
    """To either machine, by its scheduler: only RELEASED follows, whatever that has not polled yet. D has one more for
    an unknown room, at once."""

    room: bytes
    error: ChituError


class ViewChanged(NamedTuple):
    """To either machine: `PeerView` has other members, or has seen one end."""


class Tick(NamedTuple):
    """To either machine: time has passed."""


class DropEvents(NamedTuple):
    """By either machine: take back what the step thread has not polled of a room, but RELEASED. P says RELEASED where
    SUCCESS was among it."""

    room: bytes


class Send(NamedTuple):
    """By either machine: a frame."""

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
    """Where outgoing P<->D frames go: a queue that the comm thread empties. Never blocks."""

    def __call__(self, host: str, port: int, room: bytes, payload: bytes) -> None: ...


Wake = Callable[[], None]
"""Wakes the step thread after an event was queued. Any thread, never blocks."""


class PrefillSenderLike(Protocol):
    """What the step thread of P uses."""

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        """The router's half arrived; the room may have been announced before. Starts the bootstrap deadline."""
        ...

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        """The coming forward computes these chunks; `on_layer_done` then speaks of them."""
        ...

    def on_layer_done(self, layer: int, ready: Ready | None = None) -> None:
        """K and V of `layer` of the step's chunks are in the pages once `ready` has passed: send what was announced.
        Returns at once."""
        ...

    def end_step(self) -> None:
        """The forward is over; chunks of rooms not announced yet are kept for later."""
        ...

    def send_kv_cache(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        """The logits row of the room's last token is in `aux_slot`: it leaves ahead of all KV still queued.
        `prompt_logprobs` leave with Success."""
        ...

    def reset_chunks(self, room: bytes) -> bool:
        """Forget the computed pages of a room that is not announced (its pages are wanted back). False: too late."""
        ...

    def poll(self) -> list[TransferEvent]: ...

    def abort(self, room: bytes, error: ChituError) -> None:
        """Stop; tell D. Only RELEASED follows. An unknown room is ignored."""
        ...


class DecodeReceiverLike(Protocol):
    """What the step thread of D uses."""

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
        """Pages (ceil(num_tokens / page_size)) and aux slot are reserved: tell P. Starts the transfer deadline. The
        first `prefix_pages`, full ones, hold what they should already: nobody writes to them. Without pages P sends the
        logits row alone."""
        ...

    def poll(self) -> list[TransferEvent]: ...

    def abort(self, room: bytes, error: ChituError) -> None:
        """Tell P to stop. Only RELEASED follows, once P has stopped. An unknown room gets RELEASED at once."""
        ...


class CommSide(Protocol):
    """What the comm thread uses, on both roles."""

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """One P<->D message. Never raises for bad input: counts it, fails its own room at most."""
        ...

    def on_view(self, view: ClusterView) -> None:
        """The cluster view changed: rooms of incarnations that are gone fail; new P are registered with."""
        ...

    def tick(self, now_s: float) -> None:
        """Deadlines and repeats; at least every 50 ms."""
        ...

    def close(self) -> None: ...
