"""Requests on the router: pair, dispatch both halves, collect tokens, fail, cancel.

`PDRequestRouter` belongs to the loop thread. The HTTP layer calls `add_request` and `cancel`; the token port calls
`on_token_frames`; the stats port calls `on_request_failed`; membership calls `on_view`, `on_joined` and
`on_lost`; a timer calls `tick`. It knows token ids, never text.

Invariants: a room is in `_attempts` exactly while its generation waits for it; a generation ends once, with `finish` or
`error`; every end that D did not report itself sends a CancelRequest to both sides. An `Attempt` is one try on one pair
with its own room. One that fails is followed by another where `retry.py` allows it, in the same turn, so that a
generation has an attempt until it is over; after the first token the next one goes on behind what was received. What
still comes for an old room is stale, so no token is lost or comes twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.deadline_wheel import DeadlineWheel
from chitu.errors import (
    ChituError,
    DecodeLost,
    Internal,
    NoInstance,
    PrefillLost,
    ProtocolError,
    RequestCancelled,
    RequestTimeout,
    TooManyRequests,
    TransferTimeout,
    from_code,
)
from chitu.generation import Attempt, GenerateRequest, Generation
from chitu.lifecycle import ATTEMPT_AWAITS, AttemptState, waited_text
from chitu.log import CREATED_PD_REQUEST
from chitu.messages import (
    ClusterView,
    Finish,
    Heartbeat,
    InstanceInfo,
    RequestFailed,
    StageTimes,
    TokenBatch,
    token_codec,
)
from chitu.metrics import TIME_BOUNDS_S, RouterMetrics
from chitu.net.aio import Outbox
from chitu.request_dispatch import THE_ROUTER, Dispatcher, ReplyAddress
from chitu.request_journal import KEPT_RECORDS, RequestJournal, RequestSnapshot, RequestState
from chitu.retry import Failure, failure_of, may_retry
from chitu.routing import Admission, Breakers, Candidates, InstanceKey, PairSelector, Target, instance_key
from chitu.types import instance_name, new_room, room_text

log = logging.getLogger(__name__)

DEADLINE_STEP_S = 0.05
"""A request is told so much late that its time is up, at most (and the timer's step)."""

_decode_tokens = msgspec.msgpack.Decoder(TokenBatch).decode
"""Without `token_codec`'s check of the size (the socket has that bound) and its naming of errors: a frame a step."""


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
        self._dispatcher = Dispatcher(outbox, reply)
        self._retry = config.retry
        self._breakers = Breakers(config.breaker)
        self._max_in_flight = config.max_in_flight
        self._timeout_s = config.request_timeout_s
        self._admission = Admission(config, clock)
        self._attempts: dict[bytes, Attempt] = {}
        """In order of creation."""
        self._deadlines: DeadlineWheel[Generation] = DeadlineWheel(DEADLINE_STEP_S, clock.monotonic())
        self._first_tokens: DeadlineWheel[bytes] = DeadlineWheel(DEADLINE_STEP_S, clock.monotonic())
        deadlines = config.pd_disaggregation.deadlines
        self._first_token_s = deadlines.queue_s + deadlines.bootstrap_s + deadlines.transfer_s + deadlines.lease_s
        self._dirty: list[Generation] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.counters = RouterMetrics()
        self.journal = RequestJournal()

    def metrics(self) -> RouterMetrics:
        """The counters, with what is true at this moment; not to be kept, but to be encoded or added up."""
        started = sum(attempt.first_token_s is not None for attempt in self._attempts.values())
        in_flight = {"prefill": len(self._attempts) - started, "decode": started}
        now_s = self._clock.monotonic()
        breakers = {
            instance_name(instance.role, instance.engine_rank): {self._breakers.state(instance_key(instance), now_s): 1}
            for instance in (*self.candidates.prefill, *self.candidates.decode, *self.candidates.unified)
        }
        return msgspec.structs.replace(self.counters, in_flight=in_flight, breakers=breakers)

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

    def rejected(self, error: ChituError, count: int = 1) -> ChituError:
        """So many requests are refused on arrival: to be raised."""
        self.counters.count(self.counters.rejected, error.code, count)
        return error

    def require_admission(self) -> None:
        """The cheap first look at a request that nobody has parsed yet: TooManyRequests or Overloaded."""
        try:
            self._require_admission(1)
        except ChituError as error:
            raise self.rejected(error) from None

    def require_room_for(self, count: int) -> None:
        """TooManyRequests where so many more requests are over the bound, Overloaded where they would wait too long;
        NoInstance where nothing can serve."""
        try:
            self._require_room_for(count)
        except ChituError as error:
            raise self.rejected(error, count) from None

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
        timeout_s = min(self._timeout_s, request.timeout_s or self._timeout_s)
        generation = Generation(request, wake, now_s + timeout_s, now_s)
        target = self._selector.select(request.token_ids, blocked=self._breakers.blocked(now_s))
        self.counters.requests += 1
        self.counters.prompt_tokens += request.num_tokens
        self._deadlines.add(generation, generation.deadline_s)
        self._start_attempt(generation, target, request.token_ids)
        if generation.error is not None:
            raise generation.error
        return generation

    def cancel(self, generation: Generation, *, is_complete: bool = False) -> None:
        """The client is gone, or its answer `is_complete` (a stop string was found). Idempotent."""
        attempt = generation.attempt
        if attempt is None:
            return
        if is_complete:
            self._on_served(attempt, "stop")
        else:
            self.counters.cancelled += 1
        generation.error = RequestCancelled("the request was cancelled")
        self._dispatcher.cancel(attempt)
        self._forget(attempt, "finished" if is_complete else "cancelled")

    def fail_all(self, error: ChituError) -> None:
        """End everything that runs (the process is about to)."""
        for attempt in list(self._attempts.values()):
            self._dispatcher.cancel(attempt)
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
        now_s, inter_token = self._clock.monotonic(), self.counters.inter_token
        counts, waited_s = inter_token.counts, 0.0
        for generation in dirty:
            # What a reader waits from token to token; tokens that came at once share the wait. A reader that is woken
            # at the end only sees the mean of its request. So this costs a step of a wake, and nothing per token.
            # `TimeHistogram.observe` written out: the call costs as much as what it does.
            num_tokens = generation.num_taken + len(generation.tokens)
            num_new = num_tokens - generation.num_woken
            if num_new > 0:
                wait_s = now_s - generation.woken_s
                counts[bisect_left(TIME_BOUNDS_S, wait_s / num_new)] += num_new
                waited_s += wait_s
                generation.num_woken, generation.woken_s = num_tokens, now_s
            generation.dirty = False
            generation.noted = not generation.request.wake_per_token
            generation.wake()
        inter_token.sum_s += waited_s

    def on_request_failed(self, failed: RequestFailed) -> None:
        """P (or D before it could emit) gave a room up: try another pair or fail it, and tell the other side."""
        attempt = self._attempts.get(failed.room)
        if attempt is None:
            return
        reporter = InstanceKey(failed.role, failed.engine_rank, failed.incarnation)
        if reporter not in (attempt.prefill, attempt.decode):
            return  # of an older incarnation, or of nobody who serves this room
        self._on_failure(attempt, from_code(failed.code, failed.message), reporter)
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
        """An instance died. What decoded there goes on elsewhere at once, or fails. What it prefilled is tried
        elsewhere where no token came yet; else only D knows whether the KV had landed, and says so if not."""
        key = instance_key(instance)
        name = instance_name(instance.role, instance.engine_rank)
        self._outbox.close_peer(key)
        self._selector.on_lost(key)
        self._breakers.forget(key)
        for attempt in list(self._attempts.values()):
            if attempt.decode == key:
                error = DecodeLost(f"{name} is gone ({reason}) and took this request with it")
                self._on_failure(attempt, error, key)
            elif attempt.prefill == key and attempt.first_token_s is None:
                self._try_again(
                    attempt, failure_of(PrefillLost(f"{name} is gone ({reason})"), key, key, attempt.decode)
                )
        self.flush()

    def tick(self) -> None:
        """End requests that are out of time, and attempts whose end must have got lost on the way here."""
        now_s = self._clock.monotonic()
        for room in self._first_tokens.expired(now_s):
            late = self._attempts.get(room)
            if late is not None and late.first_token_s is None:
                self._on_failure(late, TransferTimeout(_waited(late, now_s)), late.decode)
        for generation in self._deadlines.expired(now_s):
            attempt = generation.attempt
            if attempt is not None:
                self._dispatcher.cancel(attempt)
                self._fail(attempt, self._timeout_of(attempt, now_s))
        self.flush()

    def _timeout_of(self, attempt: Attempt, now_s: float) -> RequestTimeout:
        generation = attempt.generation
        limit_s = generation.deadline_s - generation.created_s
        whose = "router.request_timeout_s" if limit_s >= self._timeout_s else "X-Request-Timeout"
        return RequestTimeout(f"not finished within {limit_s:g} s ({whose}): {_waited(attempt, now_s)}")

    # ----------------------------------------------------------------------------------------------------- internal

    def _start_attempt(self, generation: Generation, target: Target, token_ids: bytes) -> None:
        """Send the next attempt to these instances; to others, where one of them does not read. The generation ends
        with an error where nobody does."""
        now_s = self._clock.monotonic()
        generation.num_attempts += 1
        attempt = Attempt(
            room=new_room(),
            target=target,
            generation=generation,
            prefill=None if target.prefill is None else instance_key(target.prefill),
            decode=instance_key(target.decode),
            created_s=now_s,
            number=generation.num_attempts,
            token_ids=token_ids,
            num_continued=generation.num_emitted,
        )
        generation.attempt, generation.noted = attempt, False
        self._attempts[attempt.room] = attempt
        if attempt.prefill is not None:  # how long a unified instance may compute a prompt nobody says
            self._first_tokens.add(attempt.room, now_s + self._first_token_s)
        self.counters.attempts += 1
        for key in (attempt.prefill, attempt.decode):
            if key is not None:
                self._selector.count(key, 1, attempt.num_tokens)
                self._admission.on_sent(key, attempt.num_tokens)
                self._breakers.on_sent(key, now_s)
        if target.prefill is not None:
            request_id = generation.request.request_id
            log.info(CREATED_PD_REQUEST, request_id, target.prefill.engine_rank, target.decode.engine_rank)
        self.journal.note_change()
        full = self._dispatcher.send(attempt)
        if full is not None:
            name = instance_name(full.role, full.engine_rank)
            self._on_failure(attempt, NoInstance(f"{name} does not take requests (its queue is full)"), full)

    def _on_failure(self, attempt: Attempt, error: ChituError, reporter: InstanceKey) -> None:
        """The attempt is over. Its request goes on with another one, or ends with this error."""
        failure = failure_of(error, reporter, attempt.prefill, attempt.decode)
        if failure.is_fault:
            now_s = self._clock.monotonic()
            for key in failure.suspects:
                if self._breakers.on_failure(key, now_s):
                    name = instance_name(key.role, key.engine_rank)
                    log.warning("%s gets no requests for now: it failed too often, last by %s", name, error.code)
                    self.counters.count(self.counters.breaker_openings, name)
        if not self._try_again(attempt, failure):
            self._dispatcher.cancel(attempt)  # the other half may still compute or hold pages
            self._fail(attempt, error)

    def _try_again(self, attempt: Attempt, failure: Failure) -> bool:
        """Another attempt in place of this one: a new room, where possible on others. False where there is none.

        A request of which every token came is finished instead."""
        generation, now_s = attempt.generation, self._clock.monotonic()
        left_s = generation.deadline_s - now_s
        if reason := generation.end_reason():  # nothing is missing but the end itself
            self._dispatcher.cancel(attempt)
            self._on_served(attempt, reason)
            generation.finish = Finish(attempt.room, reason)
            self._end(attempt, "finished")
            return True
        if not may_retry(failure, self._retry, generation.num_attempts, generation.num_emitted, left_s):
            return False
        generation.avoid |= failure.suspects
        token_ids = generation.request.token_ids + generation.output.tobytes()
        try:
            target = self._selector.select(token_ids, generation.avoid, self._breakers.blocked(now_s))
        except NoInstance:
            return False
        chosen = {instance_key(instance) for instance in (target.prefill, target.decode) if instance is not None}
        if failure.needs_others and chosen & failure.suspects:
            return False
        self._dispatcher.cancel(attempt)
        attempt.error = failure.error
        self._release(attempt, "retried")
        counters, code = self.counters, failure.error.code
        counters.count(counters.retries, code)
        if generation.num_emitted:
            counters.continuations += 1
            counters.recomputed_tokens += len(token_ids) // 4
        log.warning(
            "request %s: attempt %d on %s failed after %d tokens (%s: %s), next one follows",
            generation.request.request_id,
            attempt.number,
            attempt.pair,
            generation.num_emitted,
            code,
            failure.error.message,
        )
        self._start_attempt(generation, target, token_ids)
        return True

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
            self._selector.count(attempt.prefill, -1, -attempt.num_tokens)

    def _on_finish(self, attempt: Attempt, finish: Finish) -> None:
        if finish.reason in ("stop", "length"):
            self._on_served(attempt, finish.reason)
            self._observe_stages(attempt, finish.stages)
            attempt.generation.finish = finish
            self._end(attempt, "finished")
        elif finish.reason == "error":
            self._on_failure(attempt, from_code(finish.code, finish.message), attempt.decode)
        else:
            name = instance_name(attempt.target.decode.role, attempt.target.decode.engine_rank)
            error = Internal(f"{name} ended the request as {finish.reason!r} on its own")
            self._on_failure(attempt, error, attempt.decode)

    def _on_served(self, attempt: Attempt, reason: str) -> None:
        """A request was answered to its end."""
        self.counters.count(self.counters.finished, reason)
        self.counters.e2e.observe(self._clock.monotonic() - attempt.generation.created_s)
        for key in (attempt.prefill, attempt.decode):
            if key is not None:
                self._breakers.on_success(key)

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
        attempt.error = attempt.generation.error = error
        self._end(attempt, "failed")

    def _end(self, attempt: Attempt, state: RequestState) -> None:
        self._forget(attempt, state)
        generation = attempt.generation
        if not generation.dirty:
            generation.dirty = True
            self._dirty.append(generation)

    def _forget(self, attempt: Attempt, state: RequestState) -> None:
        """The generation is over with this attempt."""
        generation = attempt.generation
        self._release(attempt, state)
        self._deadlines.discard(generation, generation.deadline_s)
        generation.attempt = None
        if not self._attempts and self._idle_waiters:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _release(self, attempt: Attempt, state: RequestState) -> None:
        """The attempt is over: whatever still comes for its room is stale."""
        del self._attempts[attempt.room]
        self._first_tokens.discard(attempt.room, attempt.created_s + self._first_token_s)
        self.journal.add(attempt.snapshot(state, self._clock.monotonic()))
        if attempt.prefill is not None and attempt.first_token_s is None:
            self._selector.count(attempt.prefill, -1, -attempt.num_tokens)
        self._selector.count(attempt.decode, -1, -attempt.num_tokens)


def _waited(attempt: Attempt, now_s: float) -> str:
    state, since_s = AttemptState.PREFILL, attempt.created_s
    if attempt.first_token_s is not None:
        state, since_s = AttemptState.DECODE, attempt.first_token_s
    what = ATTEMPT_AWAITS[state].format(peer=attempt.pair)
    return waited_text(f"attempt {attempt.number}", now_s - since_s, state, what)
