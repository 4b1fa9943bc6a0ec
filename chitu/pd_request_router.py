"""Requests on the router: pair, dispatch both halves, collect tokens, fail, cancel.

`PDRequestRouter` belongs to the loop thread. The HTTP layer calls `add_request` and `cancel`; the token port calls
`on_token_frames`; the stats port calls `on_request_failed`; membership calls `on_view`, `on_joined` and
`on_lost`; a timer calls `tick`. It knows token ids, never text.

Invariants: a room is in `_attempts` exactly while its generation waits for it; a generation ends once, with `finish` or
`error`; every end that D did not report itself sends a CancelRequest to both sides. An `Attempt` is one try on one pair
with its own room, so that a retry is a second attempt of the same generation.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import (
    ChituError,
    DecodeLost,
    Internal,
    NoInstance,
    ProtocolError,
    RequestCancelled,
    RequestTimeout,
    TooManyRequests,
    from_code,
)
from chitu.generation import Attempt, GenerateRequest, Generation
from chitu.log import CREATED_PD_REQUEST
from chitu.messages import (
    CancelRequest,
    ClusterView,
    DecodeRequest,
    Finish,
    Heartbeat,
    InstanceInfo,
    PrefillRequest,
    RequestFailed,
    StageTimes,
    TokenBatch,
    UnifiedRequest,
    encode,
    token_codec,
)
from chitu.metrics import RouterMetrics
from chitu.net.aio import Outbox
from chitu.request_journal import KEPT_RECORDS, RequestJournal, RequestSnapshot, RequestState
from chitu.routing import Admission, Candidates, InstanceKey, PairSelector, instance_key
from chitu.types import instance_name, new_room, room_text

log = logging.getLogger(__name__)

_decode_tokens = msgspec.msgpack.Decoder(TokenBatch).decode
"""Without `token_codec`'s check of the size (the socket has that bound) and its naming of errors: a frame a step."""


class ReplyAddress(NamedTuple):
    """Where P and D answer to: goes with every request."""

    worker: int = 0
    """Incarnation of the API process (`router.workers`); 0 where the router is one process."""
    token_port: int = 0
    """Its token port; 0: the router's `token_port`."""


THE_ROUTER = ReplyAddress()


class PDRequestRouter:
    def __init__(
        self,
        selector: PairSelector,
        outbox: Outbox[InstanceKey],
        clock: Clock,
        config: RouterConfig,
        reply: ReplyAddress = THE_ROUTER,
    ) -> None:
        """`reply`: which API process this is, where the router is several (`router.workers`)."""
        self._selector = selector
        self._outbox = outbox
        self._clock = clock
        self._reply = reply
        self._max_in_flight = config.max_in_flight
        self._timeout_s = config.request_timeout_s
        self._admission = Admission(config, clock)
        self._attempts: dict[bytes, Attempt] = {}
        """In order of creation: with one time-out for all, the first one is the next to run out."""
        self._dirty: list[Generation] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.counters = RouterMetrics()
        self.journal = RequestJournal()

    def metrics(self) -> RouterMetrics:
        """The counters, with what is true at this moment; not to be kept, but to be encoded or added up."""
        started = sum(attempt.first_token_s is not None for attempt in self._attempts.values())
        in_flight = {"prefill": len(self._attempts) - started, "decode": started}
        return msgspec.structs.replace(self.counters, in_flight=in_flight)

    # ---------------------------------------------------------------------------------------------------- HTTP layer

    @property
    def candidates(self) -> Candidates:
        return self._selector.candidates

    @property
    def in_flight(self) -> int:
        return len(self._attempts)

    def running(self) -> list[RequestSnapshot]:
        """What is in flight, oldest first; the newest `KEPT_RECORDS` of it."""
        newest = itertools.islice(reversed(self._attempts.values()), KEPT_RECORDS)
        return [a.snapshot("prefill" if a.first_token_s is None else "decode") for a in newest][::-1]

    def require_admission(self) -> None:
        """The cheap first look at a request that nobody has parsed yet: TooManyRequests or Overloaded."""
        try:
            self._require_admission(1)
        except ChituError as error:
            self.counters.count(self.counters.rejected, error.code)
            raise

    def require_room_for(self, count: int) -> None:
        """TooManyRequests where so many more requests are over the bound, Overloaded where they would wait too long;
        NoInstance where nothing can serve."""
        try:
            self._require_room_for(count)
        except ChituError as error:
            self.counters.count(self.counters.rejected, error.code, count)
            raise

    def _require_room_for(self, count: int) -> None:
        if not self.candidates.usable:
            raise NoInstance(self.candidates.why_unusable())
        self._require_admission(count)

    def _require_admission(self, count: int) -> None:
        if len(self._attempts) + count > self._max_in_flight:
            raise TooManyRequests(
                f"{len(self._attempts)} requests are running and {count} more would pass the limit of "
                f"{self._max_in_flight} (router.max_in_flight); try again later"
            )
        self._admission.require()

    def add_request(self, request: GenerateRequest, wake: Callable[[], None]) -> Generation:
        """Send a request to a pair (or a unified instance). `wake` is called on the loop thread when there is news,
        at most once per turn. TooManyRequests, NoInstance."""
        self.require_room_for(1)
        now_s = self._clock.monotonic()
        generation = Generation(request, wake, now_s + self._timeout_s, now_s)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.num_tokens
        self._start_attempt(generation)
        return generation

    def cancel(self, generation: Generation, *, is_complete: bool = False) -> None:
        """The client is gone, or its answer `is_complete` (a stop string was found). Idempotent."""
        attempt = generation.attempt
        if attempt is None:
            return
        if is_complete:
            self._count_finished(generation, "stop")
        else:
            self.counters.cancelled += 1
        generation.error = RequestCancelled("the request was cancelled")
        self._cancel_on_both(attempt)
        self._forget(attempt, "finished" if is_complete else "cancelled")

    def fail_all(self, error: ChituError) -> None:
        """End everything that runs (the process is about to)."""
        for attempt in list(self._attempts.values()):
            self._cancel_on_both(attempt)
            self._fail(attempt, error)
        self.flush()

    async def idle(self) -> None:
        """Returns when nothing is in flight."""
        while self._attempts:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    # -------------------------------------------------------------------------------------------------------- ports

    def on_token_frames(self, frames: list[bytes]) -> None:
        """All token messages that lay ready on the port; then wake the readers, each once. Bad ones are dropped."""
        decode = _decode_tokens
        for frame in frames:
            try:
                batch = decode(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._on_bad_tokens(frame)
            else:
                self.on_tokens(batch)
        if self._dirty:
            self.flush()

    def _on_bad_tokens(self, frame: bytes) -> None:
        self.counters.bad_token_messages += 1
        try:
            token_codec.decode(frame)
        except ProtocolError as error:
            log.warning("ignored a bad token message: %s", error)

    def on_tokens(self, batch: TokenBatch) -> None:
        """One step's tokens of one instance. Readers are woken by `flush`, once for all batches of a loop turn."""
        rooms, tokens = batch.rooms, batch.tokens
        if len(rooms) != len(tokens):
            log.error("dropped a token batch with %d rooms and %d tokens", len(rooms), len(tokens))
            return
        counters, attempt_of = self.counters, self._attempts.get
        counters.tokens += len(rooms)
        for room, token in zip(rooms, tokens, strict=False):
            attempt = attempt_of(room)
            if attempt is None:
                counters.stale_tokens += 1
                continue
            generation = attempt.generation
            generation.tokens.append(token)
            if not generation.noted:
                self._note(attempt, generation)
        for finish in batch.finished:
            attempt = attempt_of(finish.room)
            if attempt is None:
                counters.stale_ends += 1
            else:
                self._on_finish(attempt, finish)

    def flush(self) -> None:
        """Wake the readers of what changed."""
        dirty, self._dirty = self._dirty, []
        now_s, observe = self._clock.monotonic(), self.counters.inter_token.observe
        for generation in dirty:
            # What a reader waits from token to token; tokens that came at once share the wait. A reader that is woken
            # at the end only sees the mean of its request. So this costs a step of a wake, and nothing per token.
            num_tokens = generation.num_taken + len(generation.tokens)
            num_new = num_tokens - generation.num_woken
            if num_new > 0:
                observe((now_s - generation.woken_s) / num_new, num_new)
                generation.num_woken, generation.woken_s = num_tokens, now_s
            generation.dirty = False
            generation.noted = not generation.request.wake_per_token
            generation.wake()

    def on_request_failed(self, failed: RequestFailed) -> None:
        """P (or D before it could emit) gave a room up: fail it, and tell the other side."""
        attempt = self._attempts.get(failed.room)
        if attempt is None:
            return
        if InstanceKey(failed.role, failed.engine_rank, failed.incarnation) not in (attempt.prefill, attempt.decode):
            return  # of an older incarnation, or of nobody who serves this room
        self._cancel_on_both(attempt)
        self._fail(attempt, from_code(failed.code, failed.message))
        self.flush()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        key = InstanceKey(heartbeat.role, heartbeat.engine_rank, heartbeat.incarnation)
        self._selector.on_report(key, heartbeat.load)
        self._admission.on_report(key, heartbeat.load)

    # --------------------------------------------------------------------------------------------------- membership

    def on_view(self, view: ClusterView) -> None:
        """The cluster changed: new requests see it at once."""
        self._selector.on_view(view)
        self._admission.on_view(self._selector.candidates)

    def on_joined(self, instance: InstanceInfo) -> None:
        key = instance_key(instance)
        self._selector.on_joined(key)
        self._outbox.open(key, instance.host, instance.port)

    def on_lost(self, instance: InstanceInfo, reason: str) -> None:
        """An instance died. What decoded there fails at once. A lost P fails nothing here: D knows whether the KV had
        landed, and says so if not."""
        key = instance_key(instance)
        name = instance_name(instance.role, instance.engine_rank)
        for attempt in list(self._attempts.values()):
            if attempt.decode == key:
                self._cancel_on_both(attempt)
                self._fail(attempt, DecodeLost(f"{name} is gone ({reason}) and took this request with it"))
        self._outbox.close_peer(key)
        self._selector.on_lost(key)
        self.flush()

    def tick(self) -> None:
        """End requests that are out of time."""
        now_s = self._clock.monotonic()
        while self._attempts:
            attempt = next(iter(self._attempts.values()))
            if attempt.generation.deadline_s > now_s:
                break
            self._cancel_on_both(attempt)
            self._fail(attempt, RequestTimeout(f"not finished within {self._timeout_s:g} s (router.request_timeout_s)"))
        self.flush()

    # ----------------------------------------------------------------------------------------------------- internal

    def _start_attempt(self, generation: Generation) -> None:
        request = generation.request
        target = self._selector.select(request.token_ids)
        self.counters.attempts += 1
        prefill, decode = target.prefill, target.decode
        prefill_key = None if prefill is None else instance_key(prefill)
        now_s = self._clock.monotonic()
        attempt = Attempt(new_room(), target, generation, prefill_key, instance_key(decode), now_s)
        generation.attempt, generation.noted = attempt, False
        self._attempts[attempt.room] = attempt
        if prefill is not None:
            log.info(CREATED_PD_REQUEST, request.request_id, prefill.engine_rank, decode.engine_rank)
            self._selector.count(instance_key(prefill), 1, request.num_tokens)
            self._admission.on_sent(instance_key(prefill), request.num_tokens)
        self._selector.count(attempt.decode, 1, request.num_tokens)
        self._admission.on_sent(attempt.decode, request.num_tokens)
        self.journal.note_change()
        if not self._dispatch(attempt):
            self._cancel_on_both(attempt)
            generation.error = NoInstance("an instance does not take requests (its queue is full)")
            self.counters.count(self.counters.failed, generation.error.code)
            self._forget(attempt, "failed")
            raise generation.error

    def _dispatch(self, attempt: Attempt) -> bool:
        """D first, so that it can announce while P's half is on the way; neither is waited for."""
        request, room = attempt.generation.request, attempt.room
        prefill, decode = attempt.target.prefill, attempt.target.decode
        if prefill is None:
            whole = UnifiedRequest(
                room,
                request.request_id,
                request.token_ids,
                request.sampling,
                router_worker=self._reply.worker,
                reply_port=self._reply.token_port,
            )
            return self._outbox.send(attempt.decode, encode(whole))
        decode_half = DecodeRequest(
            room,
            request.request_id,
            request.token_ids,
            request.sampling,
            prefill.engine_rank,
            prefill.incarnation,
            router_worker=self._reply.worker,
            reply_port=self._reply.token_port,
        )
        prefill_half = PrefillRequest(
            room,
            request.request_id,
            request.token_ids,
            decode.engine_rank,
            decode.incarnation,
            router_worker=self._reply.worker,
        )
        send, prefill_key = self._outbox.send, instance_key(prefill)
        return send(attempt.decode, encode(decode_half)) and send(prefill_key, encode(prefill_half))

    def _note(self, attempt: Attempt, generation: Generation) -> None:
        """A token that is the attempt's first or that the reader waits for."""
        generation.noted = True
        if attempt.first_token_s is None:
            self._on_first_token(attempt)
        if generation.request.wake_per_token and not generation.dirty:
            generation.dirty = True
            self._dirty.append(generation)

    def _on_first_token(self, attempt: Attempt) -> None:
        generation = attempt.generation
        attempt.first_token_s = self._clock.monotonic()
        if generation.first_token_s is None:
            generation.first_token_s = generation.woken_s = attempt.first_token_s
            self.counters.ttft.observe(generation.first_token_s - generation.created_s)
        self.journal.note_change()
        if attempt.prefill is not None:
            self._selector.count(attempt.prefill, -1, -generation.request.num_tokens)

    def _on_finish(self, attempt: Attempt, finish: Finish) -> None:
        if finish.reason in ("stop", "length"):
            self._count_finished(attempt.generation, finish.reason)
            self._observe_stages(attempt, finish.stages)
            attempt.generation.finish = finish
            self._end(attempt, "finished")
            return
        # D gave up. P may still compute or hold pages for the room.
        self._cancel_on_both(attempt)
        if finish.reason == "error":
            self._fail(attempt, from_code(finish.code, finish.message))
        else:
            name = instance_name(attempt.target.decode.role, attempt.target.decode.engine_rank)
            self._fail(attempt, Internal(f"{name} ended the request as {finish.reason!r} on its own"))

    def _count_finished(self, generation: Generation, reason: str) -> None:
        self.counters.count(self.counters.finished, reason)
        self.counters.e2e.observe(self._clock.monotonic() - generation.created_s)

    def _observe_stages(self, attempt: Attempt, stages: StageTimes) -> None:
        counters, target = self.counters, attempt.target
        decode = instance_name(target.decode.role, target.decode.engine_rank)
        prefill = decode
        if target.prefill is not None:
            prefill = instance_name(target.prefill.role, target.prefill.engine_rank)
            counters.observe(counters.admission, decode, stages.admission_s)
            counters.observe(counters.transfer, prefill, stages.prefill.transfer_s)
        counters.observe(counters.queue, prefill, stages.prefill.queue_s)
        counters.observe(counters.prefill, prefill, stages.prefill.compute_s)

    def _fail(self, attempt: Attempt, error: ChituError) -> None:
        self.counters.count(self.counters.failed, error.code)
        log.warning(
            "request %s (room %s) failed: %s: %s",
            attempt.generation.request.request_id,
            room_text(attempt.room),
            error.code,
            error.message,
        )
        attempt.generation.error = error
        self._end(attempt, "failed")

    def _end(self, attempt: Attempt, state: RequestState) -> None:
        self._forget(attempt, state)
        generation = attempt.generation
        if not generation.dirty:
            generation.dirty = True
            self._dirty.append(generation)

    def _forget(self, attempt: Attempt, state: RequestState) -> None:
        del self._attempts[attempt.room]
        self.journal.add(attempt.snapshot(state, self._clock.monotonic()))
        attempt.generation.attempt = None
        num_tokens = attempt.generation.request.num_tokens
        if attempt.prefill is not None and attempt.first_token_s is None:
            self._selector.count(attempt.prefill, -1, -num_tokens)
        self._selector.count(attempt.decode, -1, -num_tokens)
        if not self._attempts and self._idle_waiters:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _cancel_on_both(self, attempt: Attempt) -> None:
        """Idempotent on the instances; one that is gone or does not read is not told."""
        frame = encode(CancelRequest(attempt.room))
        for key in (attempt.decode, attempt.prefill):
            if key is not None:
                self._outbox.send(key, frame)
