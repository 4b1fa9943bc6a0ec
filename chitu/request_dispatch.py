"""What the instances of an attempt are sent: the two halves of a request, or the whole, and its cancellation.

Owned by `PDRequestRouter`, on the loop thread. Nothing waits here: a queue that is full is the router's business.
"""

from __future__ import annotations

from typing import NamedTuple

from chitu.generation import Attempt
from chitu.messages import CancelRequest, DecodeRequest, PrefillRequest, UnifiedRequest, encode
from chitu.net.aio import Outbox
from chitu.routing import InstanceKey


class ReplyAddress(NamedTuple):
    """Where P and D answer to: goes with every request."""

    worker: int = 0
    """Incarnation of the API process (`router.workers`); 0 where the router is one process."""
    token_port: int = 0
    """Its token port; 0: the router's `token_port`."""


THE_ROUTER = ReplyAddress()


class Dispatcher:
    def __init__(self, outbox: Outbox[InstanceKey], reply: ReplyAddress) -> None:
        self._outbox = outbox
        self._reply = reply

    def send(self, attempt: Attempt) -> InstanceKey | None:
        """D first, so that it can announce while P's half is on the way; neither is waited for. None, or the instance
        whose queue is full."""
        request, prefill = attempt.generation.request, attempt.target.prefill
        decode, (worker, token_port) = attempt.target.decode, self._reply
        if prefill is None or attempt.prefill is None:
            whole = UnifiedRequest(
                room=attempt.room,
                request_id=request.request_id,
                token_ids=attempt.token_ids,
                sampling=request.sampling,
                num_emitted=attempt.num_continued,
                router_worker=worker,
                reply_port=token_port,
            )
            return None if self._outbox.send(attempt.decode, encode(whole)) else attempt.decode
        decode_half = DecodeRequest(
            room=attempt.room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            sampling=request.sampling,
            prefill_rank=prefill.engine_rank,
            prefill_incarnation=prefill.incarnation,
            num_emitted=attempt.num_continued,
            router_worker=worker,
            reply_port=token_port,
        )
        prefill_half = PrefillRequest(
            room=attempt.room,
            request_id=request.request_id,
            token_ids=attempt.token_ids,
            decode_rank=decode.engine_rank,
            decode_incarnation=decode.incarnation,
            router_worker=worker,
        )
        if not self._outbox.send(attempt.decode, encode(decode_half)):
            return attempt.decode
        return None if self._outbox.send(attempt.prefill, encode(prefill_half)) else attempt.prefill

    def cancel(self, attempt: Attempt) -> None:
        """Idempotent on the instances; one that is gone or does not read is not told."""
        frame = encode(CancelRequest(attempt.room))
        for key in (attempt.decode, attempt.prefill):
            if key is not None:
                self._outbox.send(key, frame)
