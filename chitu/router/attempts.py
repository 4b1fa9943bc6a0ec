"""Attempts: each one try of a request on one pair with a room of its own, from its dispatch to its end or the next one.

Owned by `PDRequestRouter`, on the loop thread, which says when a token, an end, a failure, a death or a tick came. Here
is where requests are sent, and counted as load, breaker outcome, metric and journal entry.

Invariants: a room is in `rooms` exactly while its generation waits for it. An attempt that fails is followed by another
where `retry.py` allows it, in the same turn, so a generation has an attempt until it is over; after the first token the
next one goes on behind what was received, and what still comes for an old room is stale: no token is lost or comes
twice. Every end that D did not report itself sends a CancelRequest to both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import (
    ChituError,
    DecodeLost,
    Internal,
    NoInstance,
    PoisonRequest,
    PrefillLost,
    RequestCancelled,
    RequestTimeout,
    SilentLink,
    TokensLost,
    TransferTimeout,
    from_code,
)
from chitu.log import CREATED_PD_REQUEST, about
from chitu.protocol import Finish, Heartbeat, StageTimes
from chitu.protocol.snapshot import RequestState
from chitu.protocol.states import ATTEMPT_AWAITS, AttemptState, waited_text
from chitu.router.deadline_wheel import DeadlineWheel
from chitu.router.generation import Attempt, Generation, PromptGroup
from chitu.router.metrics import Counts, RouterMetrics
from chitu.router.request_dispatch import Dispatcher, most_choices
from chitu.router.request_journal import RequestJournal
from chitu.router.retry import MAX_DEATHS, Failure, failure_of, may_retry
from chitu.router.routing import NOBODY, Admission, Breakers, InstanceKey, PairSelector, Target, instance_key
from chitu.tracing.router_trace import RouterTrace
from chitu.types import instance_name, new_room, room_text

log = logging.getLogger(__name__)

DEADLINE_STEP_S = 0.05
"""Timer resolution: a deadline fires at most this late (plus the timer's step)."""


class Attempts:
    """`on_end(generation, is_news)` is called for every generation that is over; `is_news` is false if the client
    cancelled it."""

    def __init__(
        self,
        selector: PairSelector,
        dispatcher: Dispatcher,
        admission: Admission,
        clock: Clock,
        config: RouterConfig,
        on_end: Callable[[Generation, bool], None],
        trace: RouterTrace | None = None,
    ) -> None:
        self._selector = selector
        self._dispatcher = dispatcher
        self._admission = admission
        self._clock = clock
        self._on_end = on_end
        self._trace = trace
        self._retry = config.retry
        self._breakers = Breakers(config.breaker)
        self._timeout_s = config.request_timeout_s
        deadlines = config.pd_disaggregation.deadlines
        self._first_token_s = deadlines.queue_s + deadlines.bootstrap_s + deadlines.transfer_s + deadlines.lease_s
        self._deadlines: DeadlineWheel[Generation] = DeadlineWheel(DEADLINE_STEP_S, clock.monotonic())
        self._first_tokens: DeadlineWheel[bytes] = DeadlineWheel(DEADLINE_STEP_S, clock.monotonic())
        self.rooms: dict[bytes, Attempt] = {}
        """Those that run, in order of creation."""
        self.groups: dict[bytes, PromptGroup] = {}
        """Of those in `rooms`, by the prompt's room."""
        self.num_tokens = 0
        """Of the prompts in `rooms`."""
        self.counters = RouterMetrics()
        self.journal = RequestJournal()

    def breaker_states(self) -> dict[str, Counts]:
        """By name of the instance, as `RouterMetrics.breakers` has it."""
        now_s, members = self._clock.monotonic(), self._selector.candidates
        return {
            instance_name(instance.role, instance.engine_rank): {self._breakers.state(instance_key(instance), now_s): 1}
            for instance in (*members.prefill, *members.decode, *members.unified)
        }

    # ------------------------------------------------------------------------------------------- what came from outside

    def start(self, generations: list[Generation], avoid: Set[InstanceKey] = NOBODY) -> int:
        """Send a new request, or several that differ in their seeds alone, to a pair, or a unified instance: as many as
        one message may have there, which is returned. They may have ended with an error then, where nobody takes them.
        NoInstance where nobody is there. `avoid`: it goes to others, if there are any."""
        request = generations[0].request
        blocked = self._breakers.blocked(self._clock.monotonic())
        target = self._selector.select(request.token_ids, avoid, blocked, cache_salt=request.cache_salt)
        count = 1 if len(generations) == 1 else most_choices(target.decode, request.num_tokens)
        together = generations[:count]
        for generation in together:
            self.counters.requests += 1
            self.counters.prompt_tokens += request.num_tokens
            self._deadlines.add(generation, generation.deadline_s)
        self._begin(together, target, request.token_ids)
        return len(together)

    def of(self, room: bytes) -> list[Attempt]:
        """Those that an instance means by this room: an attempt's own, or a prompt's."""
        attempt = self.rooms.get(room)
        if attempt is not None:
            return [attempt]
        group = self.groups.get(room)
        return list(group.attempts) if group is not None else []

    def cancel(self, attempt: Attempt, is_complete: bool) -> None:
        """Its client is gone, or has its whole answer: a stop string was found."""
        if is_complete:
            self._on_served(attempt, "stop")
        else:
            self.counters.cancelled += 1
        attempt.generation.error = RequestCancelled("the request was cancelled")
        self._dispatcher.cancel(attempt)
        self._end(attempt, "finished" if is_complete else "cancelled", is_news=False)

    def on_lost(self, key: InstanceKey, reason: str, has_died: bool) -> None:
        """An instance is gone, and a candidate no more."""
        name, dead = instance_name(key.role, key.engine_rank), key if has_died else None
        self._breakers.forget(key)
        for attempt in list(self.rooms.values()):
            if attempt.decode == key:
                error = DecodeLost(f"{name} is gone ({reason}) and took this request with it")
                self._fail(attempt, failure_of(error, key, attempt.prefill, key, dead))
            elif attempt.prefill == key and attempt.first_token_s is None:
                lost = PrefillLost(f"{name} is gone ({reason})")
                self._try_again(attempt, failure_of(lost, key, key, attempt.decode, dead))
            elif attempt.prefill == key:
                attempt.has_dead_prefill = has_died

    def on_lost_tokens(self, key: InstanceKey, count: int) -> None:
        """An instance has given up a number of its token messages. Nobody knows which requests they belonged to, so
        everything that decodes there goes on with another attempt, behind the last token that came in order."""
        lost = TokensLost(f"{count} token messages of {instance_name(key.role, key.engine_rank)} were lost on the way")
        for attempt in [attempt for attempt in self.rooms.values() if attempt.decode == key]:
            self.on_failure(attempt, lost, key)

    def on_heartbeat(self, key: InstanceKey, heartbeat: Heartbeat) -> None:
        """An instance says how far it has read. Requests that do not come through to it go on elsewhere."""
        for missed in self._dispatcher.on_heartbeat(key, heartbeat):
            for attempt in self.of(missed.room):
                if attempt.first_token_s is None:  # a token needs both halves
                    self.on_failure(attempt, missed.error, key)
        self._on_silent(key, frozenset(heartbeat.silent))

    def tick(self) -> None:
        """End requests that are out of time, and attempts whose end must have got lost on the way here."""
        now_s = self._clock.monotonic()
        for room in self._first_tokens.expired(now_s):
            late = self.rooms.get(room)
            if late is not None and late.first_token_s is None:
                self.on_failure(late, TransferTimeout(_waited(late, now_s)), late.decode)
        for generation in self._deadlines.expired(now_s):
            if generation.attempt is not None:
                self.give_up(generation.attempt, self._timeout_of(generation.attempt, now_s))

    def on_first_token(self, attempt: Attempt) -> None:
        generation = attempt.generation
        attempt.first_token_s = self._clock.monotonic()
        if generation.first_token_s is None:
            generation.first_token_s = generation.woken_s = attempt.first_token_s
            generation.first_prefill = attempt.prefill
            self.counters.ttft.observe(generation.first_token_s - generation.created_s)
        self.journal.note_change()
        if attempt.prefill is not None and attempt.leads:
            self._selector.count(attempt.prefill, -1, -attempt.num_tokens)

    def on_finish(self, attempt: Attempt, finish: Finish) -> None:
        if finish.reason in ("stop", "length"):
            self._on_served(attempt, finish.reason)
            self._observe_stages(attempt, finish.stages)
            attempt.generation.finish = finish
            self._end(attempt, "finished")
        elif finish.reason == "error":
            self.on_failure(attempt, from_code(finish.code, finish.message), attempt.decode)
        else:
            name = instance_name(attempt.target.decode.role, attempt.target.decode.engine_rank)
            error = Internal(f"{name} ended the request as {finish.reason!r} on its own")
            self.on_failure(attempt, error, attempt.decode)

    def on_failure(self, attempt: Attempt, error: ChituError, reporter: InstanceKey) -> None:
        """The attempt is over. Its request goes on with another one, or ends with this error."""
        dead = self._dead_by_report(attempt, error, reporter)
        self._fail(attempt, failure_of(error, reporter, attempt.prefill, attempt.decode, dead))

    def give_up(self, attempt: Attempt, error: ChituError) -> None:
        """End its request with this error. The instances may still compute or hold pages for it."""
        self._dispatcher.cancel(attempt)
        self.counters.count(self.counters.failed, error.code)
        log.warning(
            "request %s (room %s) failed: %s: %s",
            attempt.generation.request.request_id,
            room_text(attempt.room),
            error.code,
            error.message,
            extra=about(attempt.generation.request.request_id),
        )
        attempt.error = attempt.generation.error = error
        self._end(attempt, "failed")

    # ------------------------------------------------------------------------------------------------- internal

    def _begin(self, generations: list[Generation], target: Target, token_ids: bytes) -> None:
        """Send the next attempt of these, which are choices of one prompt, to these instances; to others, where one of
        them does not read. The generations end with an error where nobody does."""
        group = PromptGroup(new_room()) if len(generations) > 1 else None
        attempts = [self._attempt(generation, target, token_ids, group) for generation in generations]
        if group is not None:
            self.groups[group.room] = group
        self.journal.note_change()
        full = self._dispatcher.send(attempts[0])
        if full is not None:
            name = instance_name(full.role, full.engine_rank)
            for attempt in attempts:
                self.on_failure(attempt, NoInstance(f"{name} does not take requests (its queue is full)"), full)

    def _attempt(self, generation: Generation, target: Target, token_ids: bytes, group: PromptGroup | None) -> Attempt:
        """The next one of a generation, which is to be sent."""
        now_s = self._clock.monotonic()
        attempt = Attempt(
            room=new_room(),
            target=target,
            generation=generation,
            prefill=None if target.prefill is None else instance_key(target.prefill),
            decode=instance_key(target.decode),
            created_s=now_s,
            number=len(generation.ended) + 1,
            token_ids=token_ids,
            num_continued=generation.num_emitted,
        )
        if group is not None:
            attempt.group, attempt.leads = group, not group.attempts
            group.attempts.append(attempt)
        generation.attempt, generation.noted = attempt, False
        self.rooms[attempt.room] = attempt
        self.num_tokens += attempt.num_tokens
        if attempt.prefill is not None:  # how long a unified instance may compute a prompt nobody says
            self._first_tokens.add(attempt.room, now_s + self._first_token_s)
        self.counters.attempts += 1
        for key in (attempt.prefill, attempt.decode):
            if key is not None and (attempt.leads or key is attempt.decode):
                self._selector.count(key, 1, attempt.num_tokens)
                self._admission.on_sent(key, attempt.num_tokens if attempt.leads else 0)
                self._breakers.on_sent(key, now_s)
        if target.prefill is not None and attempt.leads:  # once a message, as P says that it came
            request_id = generation.request.request_id
            ranks = target.prefill.engine_rank, target.decode.engine_rank
            log.info(CREATED_PD_REQUEST, request_id, *ranks, extra=about(request_id))
        return attempt

    def _on_silent(self, key: InstanceKey, prefills: frozenset[int]) -> None:
        """A D does not hear these P. What waits there goes on elsewhere, where it can; else it stays: they may come to
        hear each other, and it has its deadlines. No breaker counts it: with others the two may do well. With one token
        KV may be missing; with two it is there."""
        name = instance_name(key.role, key.engine_rank)
        if self._selector.on_silent(key, prefills):
            peers = [i for i in self._selector.candidates.prefill if i.incarnation in prefills]
            names = " and ".join(instance_name(i.role, i.engine_rank) for i in peers)
            log.warning(
                "%s receives %s",
                name,
                f"nothing from {names}: such pairs get no requests" if peers else "from every P again",
            )
        if not prefills or not self._selector.has_sound_pair:
            return
        for attempt in list(self.rooms.values()):
            if attempt.decode != key or attempt.prefill is None or attempt.prefill.incarnation not in prefills:
                continue
            if attempt.generation.num_emitted <= attempt.num_continued + 1:
                error = SilentLink(f"{name} hears nothing of P{attempt.prefill.engine_rank}")
                self._try_again(attempt, Failure(error, frozenset()))

    def _dead_by_report(self, attempt: Attempt, error: ChituError, reporter: InstanceKey) -> InstanceKey | None:
        """Whose death the other half of its pair reports: it saw the process end. Of a loss that the router knew before
        it remembers itself whether that was a death."""
        prefill, decode, is_open = attempt.prefill, attempt.decode, self._dispatcher.is_open
        if isinstance(error, PrefillLost) and prefill is not None and reporter == decode:
            return prefill if attempt.has_dead_prefill or is_open(prefill) else None
        return decode if isinstance(error, DecodeLost) and reporter == prefill and is_open(decode) else None

    def _fail(self, attempt: Attempt, failure: Failure) -> None:
        if failure.is_fault and attempt.leads:
            now_s = self._clock.monotonic()
            for key in filter(self._dispatcher.is_open, failure.suspects):  # an instance that left has no breaker
                if self._breakers.on_failure(key, now_s):
                    name, code = instance_name(key.role, key.engine_rank), failure.error.code
                    log.warning("circuit breaker opened for %s: no new requests for now (last error: %s)", name, code)
                    self.counters.count(self.counters.breaker_openings, name)
        if not self._try_again(attempt, failure):
            self.give_up(attempt, failure.error)

    def _try_again(self, attempt: Attempt, failure: Failure) -> bool:
        """Another attempt in place of this one: a new room, where possible on others. False where there is none.

        A request of which every token came is finished instead, and one that instances die of ends."""
        generation, now_s = attempt.generation, self._clock.monotonic()
        left_s = generation.deadline_s - now_s
        if reason := generation.end_reason():  # nothing is missing but the end itself
            self._dispatcher.cancel(attempt)
            self._on_served(attempt, reason)
            generation.finish = Finish(attempt.room, reason)
            self._end(attempt, "finished")
            return True
        record = generation.record
        if failure.dead is not None:
            record.note_death(failure.dead, (attempt.prefill, attempt.decode))
            if record.deaths >= MAX_DEATHS:
                last = instance_name(failure.dead.role, failure.dead.engine_rank)
                text = f"{record.deaths} instances died one after the other while they had this request, {last} last"
                self.give_up(attempt, PoisonRequest(f"{text}: it is not sent to another"))
                return True
        has_progressed = attempt.has_progressed
        if not may_retry(failure, self._retry, record, generation.num_emitted, has_progressed, left_s):
            return False
        token_ids = generation.request.token_ids + generation.output.tobytes()
        avoid = record.avoid | failure.suspects
        try:
            salt = generation.request.cache_salt
            target = self._selector.select(token_ids, avoid, self._breakers.blocked(now_s), salt)
        except NoInstance:
            return False
        chosen = {instance_key(instance) for instance in (target.prefill, target.decode) if instance is not None}
        if failure.needs_others and chosen & failure.suspects:
            return False
        if isinstance(failure.error, SilentLink) and self._selector.is_cut_off(target):
            return False
        record.note(failure, has_progressed)
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
            extra=about(generation.request.request_id),
        )
        self._begin([generation], target, token_ids)
        return True

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

    def _timeout_of(self, attempt: Attempt, now_s: float) -> RequestTimeout:
        generation = attempt.generation
        limit_s = generation.deadline_s - generation.created_s
        whose = "router.request_timeout_s" if limit_s >= self._timeout_s else "X-Request-Timeout"
        return RequestTimeout(f"not finished within {limit_s:g} s ({whose}): {_waited(attempt, now_s)}")

    def _end(self, attempt: Attempt, state: RequestState, is_news: bool = True) -> None:
        """The generation is over with this attempt."""
        generation = attempt.generation
        self._release(attempt, state)
        self._deadlines.discard(generation, generation.deadline_s)
        generation.attempt = None
        self._on_end(generation, is_news)

    def _release(self, attempt: Attempt, state: RequestState) -> None:
        """The attempt is over: whatever still comes for its room is stale."""
        del self.rooms[attempt.room]
        if self._trace is not None and self._trace.framed:
            self._trace.framed.pop(attempt.room, None)
        self.num_tokens -= attempt.num_tokens
        self._first_tokens.discard(attempt.room, attempt.created_s + self._first_token_s)
        record = attempt.snapshot(state, self._clock.monotonic())
        self.journal.add(record)
        attempt.generation.ended.append(record)
        if attempt.prefill is not None and attempt.leads and attempt.first_token_s is None:
            self._selector.count(attempt.prefill, -1, -attempt.num_tokens)
        if (group := attempt.group) is not None:
            group.attempts.remove(attempt)
            if not group.attempts:
                del self.groups[group.room]
        self._selector.count(attempt.decode, -1, -attempt.num_tokens)


def _waited(attempt: Attempt, now_s: float) -> str:
    state, since_s = AttemptState.PREFILL, attempt.created_s
    if attempt.first_token_s is not None:
        state, since_s = AttemptState.DECODE, attempt.first_token_s
    what = ATTEMPT_AWAITS[state].format(peer=attempt.pair)
    return waited_text(f"attempt {attempt.number}", now_s - since_s, state, what)
