"""Requests on the router: takes them from the HTTP layer, and hands tokens from the ports to their readers.

`PDRequestRouter` belongs to the loop thread. The HTTP layer calls `add_request` and `cancel`; the token port calls
`on_token_frames`; the stats port calls `on_request_failed` and `on_heartbeat`; membership calls `on_view`, `on_joined`
and `on_lost`; a timer calls `tick`. It handles token ids, never text. `attempts.py` runs a request on its pairs;
`request.py` decides what follows if that fails.

Invariants: a generation ends once, with `finish` or `error`. Its reader is woken at most once a turn, and after its
end. No reader gets a token of a room that is over, or one that came after a gap (`net/link.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import (
    Asleep,
    ChituError,
    InvalidRequest,
    NoInstance,
    Overloaded,
    ProtocolError,
    RequestTimeout,
    TooManyRequests,
    from_code,
)
from chitu.net.aio import Outbox
from chitu.protocol import (
    ClusterView,
    Finish,
    Heartbeat,
    InstanceInfo,
    RequestFailed,
    TokenBatch,
    token_codec,
)
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.admin import Canary
from chitu.router.admission import Admission
from chitu.router.attempts import KEPT_RECORDS, Attempts
from chitu.router.candidates import Candidates, InstanceKey, instance_key
from chitu.router.dispatch import Dispatcher
from chitu.router.generation import UNCONFIRMED, Attempt, GenerateRequest, Generation, GenerationState
from chitu.router.members import ClusterMember, Members
from chitu.router.metrics import TIME_BOUNDS_S, RouterMetrics
from chitu.router.ways import Selector
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role

logger = logging.getLogger(__name__)

DECODE = GenerationState.DECODE
ASLEEP = "the cluster sleeps, and no request wakes it (POST /admin/wake does)"
_decode_tokens = msgspec.msgpack.Decoder(TokenBatch).decode
"""Decodes without `token_codec`'s size check (the socket has that bound) and error names: it runs for every frame."""


class RequestFlow(NamedTuple):
    """What the balancer needs to know of requests. Counts are since the start."""

    requests: int
    """Accepted requests, with `prompt_tokens` in all."""
    prompt_tokens: int
    offered: int
    """Requests that were accepted, or rejected for overload."""
    begun: int
    """Accepted requests that have their first token, or are over."""
    waits_s: dict[Role, float]
    """Predicted time that a request sent now waits for a P, and for a D; 0 if unknown."""
    is_cut_off: bool
    """Whether some P and D cannot reach each other."""


class PDRequestRouter:
    def __init__(
        self,
        outbox: Outbox,
        clock: Clock,
        config: RouterConfig,
        trace: RouterTrace,
        index: int = 0,
    ) -> None:
        """`index`: that of this router in `router.hosts`, where its round robin begins, too."""
        self._members = members = Members(config, outbox)
        self._clock = clock
        self._max_tokens = config.max_tokens_in_flight
        self._timeout_s = config.request_timeout_s
        early_token = config.pd_disaggregation.early_token
        self._dispatcher = Dispatcher(members, index, clock, trace, early_token)
        selector = Selector(config, members, clock, index)
        admission = Admission(config, members, clock)
        self._revisions = selector.revisions
        self._attempts = Attempts(members, selector, self._dispatcher, admission, clock, config)
        self._dirty = self._attempts.dirty
        self.trace = trace
        self._framed = trace.framed
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._released: asyncio.Event | None = None
        """Set when new requests need not wait any more; None while they need not."""
        self._is_asleep = False
        """Whether the cluster sleeps whatever requests come."""
        self._end_error: ChituError | None = None
        """Error of those that wait, once the process ends."""
        self._weights = 0
        """Number of the weights that the newest view serves."""
        self.image_files = self._attempts.files
        """Files of the images of running requests."""
        self.counters = self._attempts.counters
        self.journal = self._attempts.journal

    @property
    def canary(self) -> Canary:
        """Revision whose share of the requests an operator has set."""
        return self._revisions.canary

    @canary.setter
    def canary(self, canary: Canary) -> None:
        self._revisions.canary = canary

    def metrics(self) -> RouterMetrics:
        """Return the counters and the present gauges. Encode or add up the result at once; do not keep it."""
        prefill, rooms = GenerationState.PREFILL, self._attempts.rooms.values()
        waiting = sum(attempt.generation.state is prefill for attempt in rooms)
        in_flight = {"prefill": waiting, "decode": self.in_flight - waiting}
        files = self._attempts.files
        return msgspec.structs.replace(
            self.counters,
            in_flight=in_flight,
            breakers=self._attempts.breaker_states(),
            image_files=len(files),
            image_bytes=files.num_bytes,
        )

    def flow(self) -> RequestFlow:
        """Return the requests so far."""
        counters, attempts = self.counters, self._attempts
        rejected = sum(counters.rejected.get(error.code, 0) for error in (Overloaded, TooManyRequests))
        of_prefill, of_decode = attempts.predicted_waits_s()
        return RequestFlow(
            counters.requests,
            counters.prompt_tokens,
            counters.requests + rejected,
            counters.requests - attempts.num_waiting,
            {Role.PREFILL: of_prefill, Role.DECODE: of_decode},
            self._members.num_cut_off > 0,
        )

    # ---------------------------------------------------------------------------------------------------- HTTP layer

    @property
    def candidates(self) -> Candidates:
        return self._members.candidates

    def why_unusable(self) -> str:
        """Return a clause on why no request can be served now; empty if one can."""
        return ASLEEP if self._is_asleep else self._members.why_unusable()

    @property
    def in_flight(self) -> int:
        return len(self._attempts.rooms)

    @property
    def num_sent(self) -> int:
        """Requests in flight that are on instances: they do not wait for the end of a change of weights."""
        return self.in_flight - len(self._attempts.deferred)

    def running(self) -> list[RequestSnapshot]:
        """Return the attempts in flight, oldest first; at most the newest `KEPT_RECORDS`."""
        newest = itertools.islice(reversed(self._attempts.rooms.values()), KEPT_RECORDS)
        return [attempt.snapshot() for attempt in newest][::-1]

    def rejected(self, error: ChituError, count: int = 1) -> ChituError:
        """Count this many requests as refused on arrival and return the error; the caller raises it."""
        self.counters.rejected[error.code] += count
        return error

    def require_admission(self) -> None:
        """Raise TooManyRequests or Overloaded if no request can be admitted: a cheap check before one is parsed."""
        try:
            self._attempts.require_room(1, 1)
            self._attempts.require_short_wait()
        except ChituError as error:
            raise self.rejected(error) from None

    def require_room_for(self, count: int, num_tokens: int, is_admitted: bool = False) -> None:
        """Raise unless `count` more requests, with `num_tokens` prompt tokens in all, can be admitted. TooManyRequests:
        over a bound together with what runs. Overloaded: they would wait too long. InvalidRequest: over the bound by
        themselves. NoInstance: no instance can serve. If `is_admitted`, only the bounds are checked."""
        try:
            self._require_room_for(count, num_tokens, is_admitted)
        except ChituError as error:
            raise self.rejected(error, count) from None

    def _require_room_for(self, count: int, num_tokens: int, is_admitted: bool) -> None:
        if not self._members.can_try:
            raise NoInstance(self.why_unusable())
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                f"prompts times choices are {num_tokens} tokens; at most {self._max_tokens} are accepted at once "
                "(router.max_tokens_in_flight)",
                "prompt",
            )
        self._attempts.require_room(count, num_tokens)
        if not is_admitted:
            self._attempts.require_short_wait()

    def add_request(self, request: GenerateRequest, wake: Callable[[], None]) -> Generation:
        """Send a request to a pair (or a unified instance). `wake` is called on the loop thread when there is news, at
        most once per turn. Raises what `require_room_for` raises."""
        return self.add_choices([request], wake)[0]

    def add_choices(
        self, requests: Sequence[GenerateRequest], wake: Callable[[], None], is_admitted: bool = False
    ) -> list[Generation]:
        """Send requests that differ only in their seeds: as many of the first ones as one message may carry. Return
        these; their prompt is computed once and moved once. The caller calls again with the rest. If `is_admitted`,
        `require_room_for` was called for all prompts of the client's request: they do not wait for each other."""
        first = requests[0]
        self.require_room_for(len(requests), sum([request.num_tokens for request in requests]), is_admitted)
        now_s = self._clock.monotonic()
        timeout_s = min(self._timeout_s, first.timeout_s or self._timeout_s)
        generations = [Generation(request, wake, now_s + timeout_s, now_s) for request in requests]
        try:
            generations = generations[: self._start(generations, is_admitted)]
            for generation in generations:
                if generation.error is not None:
                    raise generation.error
        except Exception:
            for generation in generations:  # nothing else would ever end one that has an attempt
                self.cancel(generation)
            raise
        return generations

    def resume(self, request: GenerateRequest, tokens: Sequence[int], wake: Callable[[], None]) -> Generation:
        """Continue after these tokens, which instances of an earlier router emitted. The generation may be over at
        once. Raises as `add_request` does."""
        self.require_room_for(1, request.num_tokens + len(tokens))
        now_s = self._clock.monotonic()
        timeout_s = min(self._timeout_s, request.timeout_s or self._timeout_s)
        generation = Generation(request, wake, now_s + timeout_s, now_s, taken=array("i", tokens))
        generation.num_taken, generation.num_woken = len(tokens), len(tokens) + 1
        if reason := generation.end_reason():
            generation.finish = Finish(b"", reason)
            return generation
        self._start([generation])
        if generation.error is not None:
            raise generation.error
        return generation

    def _start(self, generations: list[Generation], is_admitted: bool = False) -> int:
        try:
            return self._attempts.start(generations, is_admitted=is_admitted)
        except (Overloaded, TooManyRequests) as error:
            raise self.rejected(error, len(generations)) from None

    @property
    def is_held(self) -> bool:
        """Whether new requests wait, because the cluster is paused or changes its weights."""
        return self._released is not None

    async def released(self, count: int, num_tokens: int, timeout_s: float | None) -> None:
        """Wait until new requests may start: `count` choices with `num_tokens` prompt tokens in all. They count against
        the bounds meanwhile. Raises as `require_room_for`, RequestTimeout after `timeout_s`, Asleep if no request wakes
        the cluster."""
        attempts, limit_s = self._attempts, min(self._timeout_s, timeout_s or self._timeout_s)
        attempts.require_room(count, num_tokens)
        attempts.num_held += count
        attempts.num_held_tokens += num_tokens
        try:
            async with asyncio.timeout(limit_s):
                while self._released is not None and self._end_error is None and not self._is_asleep:
                    await self._released.wait()
        except TimeoutError:
            raise RequestTimeout(
                f"the cluster is paused, or changes its weights: not begun within {limit_s:g} s"
            ) from None
        finally:
            attempts.num_held -= count
            attempts.num_held_tokens -= num_tokens
        if self._end_error is not None:
            raise self._end_error
        if self._is_asleep:
            raise self.rejected(Asleep(ASLEEP), count)

    @property
    def num_awaiting(self) -> int:
        """Requests that wait until new ones may start: in `released`, or for an instance that refused them."""
        return self._attempts.num_held + len(self._attempts.deferred)

    @property
    def num_held(self) -> int:
        """Choices of requests that wait in `released`."""
        return self._attempts.num_held

    def cancel(self, generation: Generation, *, is_complete: bool = False) -> None:
        """End a generation whose client is gone, or whose answer `is_complete` (a stop string was found).
        Idempotent."""
        if not generation.done:
            self._attempts.cancel(generation, is_complete)
            self._end_idle_waits()

    def fail_all(self, error: ChituError) -> None:
        """End every request, running or held, with this error (the process is about to end)."""
        self._end_error = error
        if self._released is not None:
            self._released.set()
        self._attempts.give_up_all(error)
        self.flush()

    def close(self) -> None:
        """Close the sockets to all instances. Nothing is sent any more."""
        self._members.close()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self._attempts.rooms:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    # -------------------------------------------------------------------------------------------------------- ports

    def on_token_frames(self, frames: list[bytes]) -> None:
        """Handle the token messages that are ready on the port, then wake each reader once. Bad messages are
        dropped."""
        decode, framed, batches = _decode_tokens, self._framed, []
        for frame in frames:
            try:
                batch = decode(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._on_bad_tokens(frame)
            else:
                batches.append(batch)
                if framed:
                    self._trace_frame(batch, frame)
        self.on_tokens(*batches)
        if self._dirty:
            self.flush()

    def _trace_frame(self, batch: TokenBatch, frame: bytes) -> None:
        """Record the frame once for each request that it is about and whose frames are wanted."""
        rooms = {*batch.rooms, *(room for room, _ in batch.groups), *(room for room, _ in batch.early)}
        for room in {*rooms, *(finish.room for finish in batch.finished)} & self._framed.keys():
            self.trace.note_frame(self._framed[room], room, "received", "token", frame)

    def _on_bad_tokens(self, frame: bytes) -> None:
        self.counters.bad_token_messages += 1
        try:
            token_codec.decode(frame)
        except ProtocolError as error:
            logger.warning("ignored a bad token message: %s", error)

    def on_tokens(self, *batches: TokenBatch) -> None:
        """Apply the tokens of steps, in order. `flush` wakes the readers, once for all batches of a loop turn. Without
        a pause between steps there is a batch for each token, so this does nothing per batch that it can do once."""
        counters, member_of, attempt_of = self.counters, self._members.by_link.get, self._attempts.rooms.get
        num_tokens = 0
        for batch in batches:
            rooms, tokens, logprobs = batch.rooms, batch.tokens, batch.logprobs
            if len(rooms) != len(tokens) or (logprobs and not _are_places(logprobs, len(rooms))):
                logger.error("dropped a token batch with %d rooms and %d tokens", len(rooms), len(tokens))
                continue
            if number := batch.number:
                member = member_of(batch.link)
                if member is None:
                    continue  # it answers another router
                receiver = member.receiver
                if number == receiver.last + 1 and not receiver.has_gap:
                    receiver.last = number  # as `take` does, whose call costs as much as a token
                elif not self._is_next(member, batch):
                    continue
            if logprobs or batch.cached or batch.prompt_logprobs or batch.weights or batch.early:
                self._apply_extras(batch)
            if batch.groups:
                self._apply_groups(batch)
            num_tokens += len(rooms)
            for room, token in zip(rooms, tokens):  # noqa: B905 - lengths checked above; the keyword costs as much as two tokens
                attempt = attempt_of(room)
                if attempt is None:
                    counters.stale_tokens += 1
                    continue
                generation = attempt.generation
                generation.tokens.append(token)
                if not generation.needs_no_wake:
                    self._on_awaited_token(attempt, generation)
            for finish in batch.finished:
                attempt = attempt_of(finish.room)
                if attempt is not None:
                    self._attempts.on_finish(attempt, finish)
        counters.tokens += num_tokens

    def _is_next(self, member: ClusterMember, batch: TokenBatch) -> bool:
        """Return whether a message is the next one of its link. Handle a gap before it."""
        receiver = member.receiver
        is_next = receiver.take(batch.number, batch.num_kept)
        if receiver.is_gap_new:
            self._dispatcher.report_gap(member)
        if receiver.given_up:
            self._attempts.on_lost_tokens(member.key, receiver.given_up)
            receiver.given_up = 0
        return is_next

    def _apply_groups(self, batch: TokenBatch) -> None:
        """Apply the tokens of requests whose tokens come in groups."""
        attempt_of = self._attempts.rooms.get
        for room, tokens in batch.groups:
            self.counters.tokens += len(tokens)
            attempt = attempt_of(room)
            if attempt is None:
                self.counters.stale_tokens += len(tokens)
                continue
            generation = attempt.generation
            generation.tokens += tokens
            if tokens and not generation.needs_no_wake:
                self._on_awaited_token(attempt, generation)

    def _apply_extras(self, batch: TokenBatch) -> None:
        """Apply what few messages have beside tokens, ahead of these."""
        attempt_of = self._attempts.rooms.get
        if batch.weights and (member := self._members.by_link.get(batch.link)) is not None:
            for running in self._attempts.rooms.values():
                if running.decode == member.key:
                    running.generation.note_weights(batch.weights)
        for room, cached_tokens in batch.cached:
            if (attempt := attempt_of(room)) is not None:
                attempt.cached_tokens = max(0, min(cached_tokens, attempt.num_tokens))
        for room, lines in batch.prompt_logprobs:
            for attempt in self._attempts.in_room(room):
                attempt.generation.prompt_logprobs = lines
        for place, packed in batch.logprobs:
            attempt = attempt_of(batch.rooms[place])
            if attempt is not None:
                attempt.generation.logprobs.append(packed)
        for room, token in batch.early:
            attempt = attempt_of(room)
            if attempt is None or attempt.prefill is None or attempt.prefill.incarnation != batch.incarnation:
                self.counters.early_tokens["stale"] += 1
            else:
                self._attempts.on_early_token(attempt, token)

    def flush(self) -> None:
        """Wake the readers of all generations that changed."""
        dirty = self._dirty[:]
        self._dirty.clear()
        now_s, inter_token = self._clock.monotonic(), self.counters.inter_token
        counts, waited_s = inter_token.counts, 0.0
        for generation in dirty:
            # The reader's wait from token to token; tokens that came together share the wait. A reader that is woken
            # only at the end sees the mean of its request. So this costs time per wake, not per token.
            # `TimeHistogram.observe` is inlined: the call costs as much as what it does.
            num_tokens = generation.num_taken + len(generation.tokens)
            num_new = num_tokens - generation.num_woken
            is_read_singly = generation.request.wake_per_token
            if num_new > 0:
                wait_s = now_s - generation.woken_s
                if generation.num_woken == 1 and is_read_singly:
                    self.counters.second_token.observe(wait_s)
                counts[bisect_left(TIME_BOUNDS_S, wait_s / num_new)] += num_new
                waited_s += wait_s
                generation.num_woken, generation.woken_s = num_tokens, now_s
            generation.dirty = False
            generation.needs_no_wake = not is_read_singly
            generation.wake()
        inter_token.sum_s += waited_s
        self._end_idle_waits()

    def on_request_failed(self, failed: RequestFailed) -> None:
        """Handle a room that P (or D before its first token) gave up: retry it elsewhere or fail it, and cancel it on
        the other side."""
        reporter = InstanceKey(failed.role, failed.engine_rank, failed.incarnation)
        for attempt in self._attempts.in_room(failed.room):
            if reporter in (attempt.prefill, attempt.decode):  # else of an older incarnation or another room
                self._attempts.on_failure(attempt, from_code(failed.code, failed.message), reporter)
        self.flush()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        member = self._members.get(InstanceKey(heartbeat.role, heartbeat.engine_rank, heartbeat.incarnation))
        if member is not None:
            self._members.on_report(member, heartbeat.load, self._clock.monotonic())
            self._attempts.on_heartbeat(member, heartbeat)
            self.flush()

    # --------------------------------------------------------------------------------------------------- membership

    def on_view(self, view: ClusterView) -> None:
        """Apply a new cluster view; new requests are routed by it at once."""
        self._members.on_view(view)
        self._is_asleep = bool(view.weights.pause.sleep and view.weights.pause.stays)
        if self._is_asleep and self._released is not None:
            self._released.set()  # those that wait already are refused, too
            self._released = asyncio.Event()
        if view.weights.holds and self._released is None:
            self._released = asyncio.Event()
        elif not view.weights.holds and self._released is not None:
            self._released.set()
            self._released = None
        if view.weights.serve.number != self._weights:
            self._weights = view.weights.serve.number
        self._attempts.is_held = self.is_held
        self._attempts.resume_deferred()
        self.flush()

    def on_joined(self, instance: InstanceInfo) -> None:
        """Add an instance. Raises Capacity if there is no socket for it; then it is no member."""
        self._members.add(instance)

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        """Handle the loss of an instance. Requests that decode there are retried elsewhere at once, or fail. Requests
        that it prefilled are retried if no token came yet; otherwise only D knows whether all KV had landed, and
        reports it if not."""
        key = instance_key(instance)
        self._members.remove(key)
        self._attempts.on_lost(key, reason, has_died)
        self.flush()

    def tick(self) -> None:
        """End requests that are out of time."""
        self._attempts.tick()
        self.flush()

    # ----------------------------------------------------------------------------------------------------- internal

    def _on_awaited_token(self, attempt: Attempt, generation: Generation) -> None:
        """Handle a token that is the first of the attempt's D or that the reader waits for."""
        if generation.state is not DECODE and generation.state in UNCONFIRMED:
            self._attempts.on_first_token(attempt)
            if attempt.is_early:
                return
        generation.needs_no_wake = True
        if generation.request.wake_per_token and not generation.dirty:
            generation.dirty = True
            self._dirty.append(generation)

    def _end_idle_waits(self) -> None:
        if self._idle_waiters and not self._attempts.rooms:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _are_places(logprobs: list[tuple[int, bytes]], num_tokens: int) -> bool:
    return all(0 <= place < num_tokens for place, _ in logprobs)
