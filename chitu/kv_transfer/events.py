"""Events of the transfer layer for the step thread, the thin interfaces between the two, and what both machines share.

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


class PrefillSenderLike(Protocol):
    """The transfer layer as P's step thread uses it."""

    def add_request(
        self, room: bytes, request_id: str, num_tokens: int, decode_rank: int, decode_incarnation: int
    ) -> None:
        """Take the router's request; the room may have been announced before. Starts the bootstrap deadline."""
        ...

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        """Begin a step whose forward pass computes these chunks; `on_layer_done` then refers to them."""
        ...

    def on_layer_done(self, layer: int, ready: Ready | None = None) -> None:
        """Send `layer` of the announced chunks of this step: its K and V are in the pages once `ready` has passed.
        Returns at once."""
        ...

    def end_step(self) -> None:
        """End the step; chunks of rooms not announced yet are kept for later."""
        ...

    def send_kv_cache(self, room: bytes, aux_slot: int, prompt_logprobs: bytes | None = None) -> None:
        """Send the logits row of the room's last token, which is in `aux_slot`, ahead of all KV still queued.
        `prompt_logprobs` leave with Success."""
        ...

    def reset_chunks(self, room: bytes) -> bool:
        """Forget the computed pages of a room that is not announced, to free them. Return False if it is too late."""
        ...

    def poll(self) -> list[TransferEvent]: ...

    def abort(self, room: bytes, error: ChituError) -> None:
        """Stop a room and report that to D. Only RELEASED follows. An unknown room is ignored."""
        ...


class DecodeReceiverLike(Protocol):
    """The transfer layer as D's step thread uses it."""

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
        """Announce reserved pages (ceil(num_tokens / page_size)) and an aux slot to P. Starts the transfer deadline.
        The first `prefix_pages`, all full, already hold their KV: P does not write to them. Without pages P sends the
        logits row only."""
        ...

    def poll(self) -> list[TransferEvent]: ...

    def abort(self, room: bytes, error: ChituError) -> None:
        """Tell P to stop. Only RELEASED follows, once P has stopped. An unknown room gets RELEASED at once."""
        ...


class CommSide(Protocol):
    """The transfer layer as the comm thread uses it, on both roles."""

    def on_frame(self, room: bytes, payload: bytes) -> None:
        """Process one P<->D message. Never raises for bad input: counts it, and fails its own room at most."""
        ...

    def on_view(self, view: ClusterView) -> None:
        """Take a new cluster view: fail the rooms of incarnations that are gone, and register with new P."""
        ...

    def tick(self, now_s: float) -> None:
        """Apply deadlines and repeat messages. Called at least every 50 ms."""
        ...

    def close(self) -> None: ...
