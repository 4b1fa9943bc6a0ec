"""The attempts of requests: each is one try on one pair, with its own room, from its dispatch to its end.

Owned by `PDRequestRouter`, which calls it on the loop thread for a first token, an end, a failure, a loss and a tick.
`request.py` decides what follows, and this module carries it out: it sends, cancels and logs requests, selects pairs,
and keeps loads, breakers, metrics, deadlines and the journal, which `GET /cluster` shows.

Invariants: a room is in `rooms` exactly while its generation waits for it. Messages for an older room are stale, so no
token is lost or delivered twice. Only `_apply` gives the machine an event, and it carries out all effects at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import ChituError, Integrity, NoInstance, TokensLost, TooManyRequests
from chitu.log import CREATED_PD_REQUEST, about
from chitu.protocol import Finish, Heartbeat
from chitu.protocol.account import RequestSnapshot, Stages
from chitu.router.admission import Admission
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.dispatch import Dispatcher, max_choices
from chitu.router.generation import Attempt, Generation, GenerationState, PromptGroup
from chitu.router.image_files import ImageFiles
from chitu.router.members import NO_INSTANCES, ClusterMember, Members
from chitu.router.metrics import Counts, RouterMetrics
from chitu.router.request import (
    AttemptFailed,
    Begin,
    Blame,
    Cancel,
    Choose,
    CountServed,
    CountStarted,
    Ended,
    Event,
    Finished,
    GenerationMachine,
    GivenUp,
    InstanceLost,
    NoPair,
    NotDelivered,
    OutOfTime,
    PairChosen,
    ReaderGone,
    Silent,
    TokenCameEarly,
    TokensBegan,
)
from chitu.router.retry import Failure
from chitu.router.ways import Selector
from chitu.types import Role, instance_name, new_room

logger = logging.getLogger(__name__)

KEPT_RECORDS = 64
T = TypeVar("T", bound=Hashable)
DEADLINE_STEP_S = 0.05
"""Timer resolution: a deadline fires at most this late (plus the timer's step)."""


class RequestJournal:
    """The attempts that ended last. Times named `_at_s` are on the router's monotonic clock."""

    def __init__(self) -> None:
        self.ended: deque[RequestSnapshot] = deque(maxlen=KEPT_RECORDS)
        """Attempts that ended, oldest first."""
        self.version = 0
        """Increases with every start, first token and end."""

    def add(self, ended: RequestSnapshot) -> None:
        self.ended.append(ended)
        self.version += 1


class TimerWheel(Generic[T]):
    """Items by deadline, in buckets of `step_s`; an expiry is reported at most this late, and never early. Adding,
    removing and expiring cost the same however many items there are."""

    def __init__(self, step_s: float, now_s: float) -> None:
        self._step_s = step_s
        self._buckets: dict[int, set[T]] = {}
        self._done = int(now_s // step_s) - 1
        """Newest bucket that `expired` has emptied."""

    def add(self, item: T, deadline_s: float) -> None:
        """Add an item whose deadline is in the future."""
        self._buckets.setdefault(int(deadline_s // self._step_s) + 1, set()).add(item)

    def discard(self, item: T, deadline_s: float) -> None:
        """Remove an item that was added with this deadline. Does nothing if it has already expired."""
        number = int(deadline_s // self._step_s) + 1
        bucket = self._buckets.get(number)
        if bucket is not None:
            bucket.discard(item)
            if not bucket:
                del self._buckets[number]

    def expired(self, now_s: float) -> list[T]:
        """Remove and return every item whose deadline has passed."""
        found: list[T] = []
        newest = int(now_s // self._step_s)
        for number in range(self._done + 1, newest + 1):
            found.extend(self._buckets.pop(number, ()))
        self._done = max(self._done, newest)
        return found


class Attempts:
    """The running attempts."""

    def __init__(
        self,
        members: Members,
        selector: Selector,
        dispatcher: Dispatcher,
        admission: Admission,
        clock: Clock,
        config: RouterConfig,
    ) -> None:
        self._members = members
        self._selector = selector
        self._dispatcher = dispatcher
        self._admission = admission
        self._clock = clock
        self._machine = GenerationMachine(config)
        self._max_in_flight = config.max_in_flight
        self._max_tokens = config.max_tokens_in_flight
        self._deadlines: TimerWheel[Generation] = TimerWheel(DEADLINE_STEP_S, clock.monotonic())
        self.rooms: dict[bytes, Attempt] = {}
        """Running attempts by room, in order of creation."""
        self.groups: dict[bytes, PromptGroup] = {}
        """Groups of the attempts in `rooms`, by the prompt's room."""
        self.num_tokens = 0
        """Tokens that the attempts in `rooms` prefill."""
        self.num_held = self.num_held_tokens = 0
        """Choices of requests that wait for the end of a pause, and their prompt tokens."""
        self.is_held = False
        """Whether new requests wait, because the cluster is paused or changes its weights."""
        self.deferred: dict[Generation, Choose] = {}
        """Requests whose attempt was ended by a change of weights, and that wait for its end; still in `rooms`."""
        self.num_waiting = 0
        """Attempts in `rooms` without a token."""
        self.dirty: list[Generation] = []
        """Generations whose readers are to be woken."""
        self.files = ImageFiles(config.max_total_body_bytes)
        self.counters = RouterMetrics()
        self.journal = RequestJournal()

    def breaker_states(self) -> dict[str, Counts]:
        """Return breaker states by instance name, in the form of `RouterMetrics.breakers`."""
        now_s, members = self._clock.monotonic(), self._members
        candidates = members.candidates
        keys = map(instance_key, (*candidates.prefill, *candidates.decode, *candidates.unified))
        return {key.name: {members[key].breaker.state(now_s): 1} for key in keys}

    # ------------------------------------------------------------------------------------------- what came from outside

    def require_room(self, count: int, num_tokens: int) -> None:
        """Raise TooManyRequests if `count` more requests, with `num_tokens` prompt tokens in all, would be too many."""
        num_running, num_tokens_now = len(self.rooms) + self.num_held, self.num_tokens + self.num_held_tokens
        if num_running + count > self._max_in_flight:
            raise TooManyRequests(
                f"{num_running} requests are running and {count} more would pass the limit of "
                f"{self._max_in_flight} (router.max_in_flight); try again later"
            )
        if num_tokens_now + num_tokens > self._max_tokens:
            raise TooManyRequests(
                f"prompts of {num_tokens_now} tokens are running and {num_tokens} more would pass the limit "
                f"of {self._max_tokens} (router.max_tokens_in_flight); try again later"
            )

    def require_short_wait(self) -> None:
        """Raise Overloaded if a request would wait for too long."""
        self._admission.require()

    def predicted_waits_s(self) -> tuple[float, float]:
        """Return how long a request sent now would wait for a P, and for a D; 0 if unknown."""
        return self._admission.predicted_waits_s()

    def start(self, generations: list[Generation], is_admitted: bool = False) -> int:
        """Send a new request, or several that differ only in their seeds, to a pair or a unified instance. Return how
        many were sent: as many as one message may carry there. They may already have ended with an error if no instance
        takes them. Raises NoInstance if there is none, TooManyRequests if there are too many files of images,
        ModelNotFound or WeightsChanged if its LoRA adapter serves no more, and Overloaded unless `is_admitted` if it
        would wait too long in the way that was chosen."""
        request = generations[0].request
        if request.files:
            self.files.require_room(request.files)
        blocked = self._members.blocked(self._clock.monotonic())
        token_ids = request.token_ids + generations[0].taken.tobytes()  # output of an earlier router, if any
        limits = request.prefix_salt, request.sampling.max_tokens, request.slo
        admit = None if is_admitted else self._admission.require_way
        way = self._selector.select(token_ids, NO_INSTANCES, blocked, *limits, admit, request.images)
        if (other := generations[0].why_other_adapter(way.decode)) is not None:
            raise other
        count = 1 if len(generations) == 1 else max_choices(way.decode, request.num_tokens)
        together = generations[:count]
        group, groups = PromptGroup(new_room()) if len(together) > 1 else None, self._members.groups_of(way)
        if group is not None:
            self.groups[group.room] = group
        if request.files:
            for _ in together:
                self.files.add(request.files)
        for generation in together:
            self.counters.requests += 1
            self.counters.prompt_tokens += request.num_tokens
            self._deadlines.add(generation, generation.deadline_s)
            self._apply(generation, PairChosen(way, new_room(), token_ids, group=group, groups=groups))
        if group is not None and (refused := self._dispatch(group.attempts[0])) is not None:
            for generation in together:
                self._apply(generation, refused)
        return len(together)

    def in_room(self, room: bytes) -> list[Attempt]:
        """Return the attempts that an instance means by this room: that of one attempt, or of a prompt."""
        attempt = self.rooms.get(room)
        if attempt is not None:
            return [attempt]
        group = self.groups.get(room)
        return list(group.attempts) if group is not None else []

    def cancel(self, generation: Generation, is_complete: bool) -> None:
        """End a generation whose client is gone or has its whole answer (a stop string was found). Idempotent."""
        self._apply(generation, ReaderGone(is_complete))

    def give_up_all(self, error: ChituError) -> None:
        self._apply_all(GivenUp(error))

    def on_lost(self, key: InstanceKey, reason: str, has_died: bool) -> None:
        """Handle the loss of an instance, which is no member any more."""
        self._apply_all(InstanceLost(key, reason, has_died))

    def on_lost_tokens(self, key: InstanceKey, count: int) -> None:
        """Handle `count` token messages that an instance gave up. The router cannot tell which requests lost tokens, so
        it retries every request that decodes on this instance, after the last token that came in order."""
        lost = TokensLost(f"{count} token messages of {key.name} were lost on the way")
        for attempt in [attempt for attempt in self.rooms.values() if attempt.decode == key]:
            self.on_failure(attempt, lost, key)

    def on_heartbeat(self, member: ClusterMember, heartbeat: Heartbeat) -> None:
        """Handle a heartbeat: retry requests that did not reach the instance, or whose P it receives nothing from."""
        for missed in self._dispatcher.on_heartbeat(member, heartbeat):
            for attempt in self.in_room(missed.room):
                self._apply(attempt.generation, NotDelivered(missed.error, member.key))
        if member.key.role is Role.PREFILL:
            self._on_suspended(member, frozenset(heartbeat.load.suspended))
        else:
            self._on_silent(member, frozenset(heartbeat.silent))

    def tick(self) -> None:
        """End requests that are out of time; send deferred requests again."""
        self.resume_deferred()
        for generation in self._deadlines.expired(self._clock.monotonic()):
            self._apply(generation, OutOfTime())

    def on_first_token(self, attempt: Attempt) -> None:
        """Handle the first token of an attempt's D, which is the newest of its generation. If P's came before, it was
        shown: the same one confirms it and is no token more, another one ends the attempt."""
        tokens = attempt.generation.tokens
        if attempt.first_token is None:
            attempt.first_token = tokens[-1]
        else:
            self.counters.tokens -= 1  # it was counted as P's
            if not self._is_same(attempt, tokens.pop(), attempt.decode):
                return
            self.counters.early_tokens["confirmed"] += 1
        self._apply(attempt.generation, TokensBegan())

    def on_early_token(self, attempt: Attempt, token: int) -> None:
        """Handle the first token of an attempt's P. It is shown, unless D's came before."""
        generation, prefill = attempt.generation, attempt.prefill
        if attempt.first_token is not None:
            if prefill is not None and self._is_same(attempt, token, prefill):
                self.counters.early_tokens["late"] += 1
            return
        attempt.first_token = token
        generation.tokens.append(token)
        self.counters.tokens += 1
        self.counters.early_tokens["shown"] += 1
        self._apply(generation, TokenCameEarly())
        if not generation.dirty:  # `needs_no_wake` stays off: D's token must not only be appended
            generation.dirty = True
            self.dirty.append(generation)

    def _is_same(self, attempt: Attempt, token: int, reporter: InstanceKey) -> bool:
        """Return whether this is the attempt's first token. If not, P or D is wrong, and nobody can tell which: the
        request continues with others, behind what was shown."""
        if token == attempt.first_token:
            return True
        self.counters.early_tokens["different"] += 1
        text = f"{attempt.pair} drew two first tokens from one row of logits: {attempt.first_token}, then {token}"
        self.on_failure(attempt, Integrity(f"{text} by {reporter.name}"), reporter)
        return False

    def on_finish(self, attempt: Attempt, finish: Finish) -> None:
        prefill = attempt.prefill
        is_prefill_here = prefill is not None and self._members.get(prefill) is not None
        self._apply(attempt.generation, Finished(finish, is_prefill_here))

    def on_failure(self, attempt: Attempt, error: ChituError, reporter: InstanceKey) -> None:
        """Handle a failure that `reporter` reported, or for which the router blames it."""
        peer = attempt.prefill if reporter == attempt.decode else attempt.decode
        is_peer_here = peer is not None and self._members.get(peer) is not None
        self._apply(attempt.generation, AttemptFailed(error, reporter, is_peer_here))

    # ------------------------------------------------------------------------------------------- what the machine wants

    def _apply_all(self, event: Event) -> None:
        for attempt in list(self.rooms.values()):
            self._apply(attempt.generation, event)

    def _apply(self, generation: Generation, event: Event) -> None:
        """Give the machine an event and carry out the effects: the only way in which a request changes."""
        following: Event | None = event
        while following is not None:
            event, following = following, None
            for effect in self._machine.handle(generation, event, self._clock.monotonic()):
                if isinstance(effect, Begin):
                    following = self._begin(effect.attempt)
                elif isinstance(effect, CountStarted):
                    self._count_started(effect.attempt, effect.is_first)
                elif isinstance(effect, CountServed):
                    self._count_served(effect.attempt, effect.reason)
                elif isinstance(effect, Ended):
                    self._end(effect.attempt, effect.record, effect.is_news)
                elif isinstance(effect, Cancel):
                    self._dispatcher.cancel(effect.attempt)
                elif isinstance(effect, Blame):
                    self._blame(effect.failure)
                else:
                    following = self._choose(generation, effect)

    def _begin(self, attempt: Attempt) -> Event | None:
        """Count an attempt, and send it, unless it goes out with its group."""
        way, request_id = attempt.way, attempt.generation.request.request_id
        self.rooms[attempt.room] = attempt
        self.num_tokens += attempt.num_tokens
        self.num_waiting += 1
        self.counters.attempts += 1
        for member, new_tokens in self._used(attempt):
            member.load.on_sent(new_tokens, attempt.created_s)
            member.breaker.on_sent(attempt.created_s)
        if way.prefill is not None and attempt.is_group_leader:  # once per message, as P logs its arrival
            ranks = way.prefill.engine_rank, way.decode.engine_rank
            logger.info(CREATED_PD_REQUEST, request_id, *ranks, extra=about(request_id))
        return self._dispatch(attempt) if attempt.group is None else None

    def _used(self, attempt: Attempt) -> list[tuple[ClusterMember, int]]:
        """Return the members that an attempt counts on, with the prompt tokens that each computes for it. Of a group
        only the leader counts on P, and computes."""
        keys = [attempt.prefill] if attempt.prefill is not None and attempt.is_group_leader else []
        new_tokens = attempt.way.new_tokens if attempt.is_group_leader else 0
        computes = attempt.prefill or attempt.decode
        found = [(self._members.get(key), new_tokens if key == computes else 0) for key in (*keys, attempt.decode)]
        return [(member, tokens) for member, tokens in found if member is not None]

    def _dispatch(self, attempt: Attempt) -> AttemptFailed | None:
        """Send an attempt, or its whole group. Return a failure if an instance does not read."""
        self.journal.version += 1
        full = self._dispatcher.send(attempt)
        if full is None:
            return None
        text = f"{full.name} accepts no requests (its queue is full)"
        return AttemptFailed(NoInstance(text), full)

    def resume_deferred(self) -> None:
        """Send the deferred requests again, unless new ones wait, too."""
        if self.is_held or not self.deferred:
            return
        deferred, self.deferred = self.deferred, {}
        for generation, wanted in deferred.items():
            wanted.token_ids = generation.request.token_ids + generation.output.tobytes()  # some were on their way
            if (event := self._choose(generation, wanted, is_again=True)) is not None:
                self._apply(generation, event)

    def _defer(self, generation: Generation, wanted: Choose) -> None:
        """Have a request wait, and nothing of it run: the instances change once they have nothing to do."""
        if generation.attempt is not None:
            self._dispatcher.cancel(generation.attempt)
        self.deferred[generation] = wanted

    def _choose(self, generation: Generation, wanted: Choose, is_again: bool = False) -> Event | None:
        """Return what follows a failed attempt; None if that is decided later."""
        if wanted.failure.is_early and not is_again:  # the instance knows of the change, this router perhaps not yet
            self._defer(generation, wanted)
            return None
        blocked = self._members.blocked(self._clock.monotonic())
        try:
            request = generation.request
            limits = request.prefix_salt, request.sampling.max_tokens, request.slo
            way = self._selector.select(wanted.token_ids, wanted.avoid, blocked, *limits, images=request.images)
        except NoInstance:
            if self.is_held and generation.state is GenerationState.RETRYING:  # else its attempt is kept
                self._defer(generation, wanted)
                return None
            return NoPair(wanted.failure)
        prefill, decode = way.prefill, instance_key(way.decode)
        is_cut_off = prefill is not None and self._members.is_cut_off(instance_key(prefill), decode)
        groups = self._members.groups_of(way)
        return PairChosen(way, new_room(), wanted.token_ids, wanted.failure, is_cut_off, groups=groups)

    def _on_silent(self, decode: ClusterMember, prefills: frozenset[int]) -> None:
        """Note the P that a D receives nothing from. Their requests on it are retried elsewhere if possible. Paired
        with others, both sides may work."""
        if self._members.on_cut_off(decode, prefills):
            peers = [i for i in self._members.candidates.prefill if i.incarnation in prefills]
            names = " and ".join(i.name for i in peers)
            logger.warning(
                "%s receives %s",
                decode.name,
                f"nothing from {names}: such pairs get no requests" if peers else "from every P again",
            )
        if not prefills or not self._members.has_sound_pair:
            return
        for attempt in list(self.rooms.values()):
            if attempt.decode == decode.key and attempt.prefill is not None and attempt.prefill.incarnation in prefills:
                self._apply(attempt.generation, Silent())

    def _on_suspended(self, prefill: ClusterMember, decodes: frozenset[int]) -> None:
        """Note the D that a P does not write to. It fails the requests of such pairs itself, so those are not moved."""
        if self._members.on_cut_off(prefill, decodes):
            names = " and ".join(instance_name(Role.DECODE, rank) for rank in sorted(decodes))
            news = f"does not write to {names}: such pairs get no requests" if names else "writes to every D again"
            logger.warning("%s %s", prefill.name, news)

    def _blame(self, failure: Failure) -> None:
        now_s = self._clock.monotonic()
        here = [member for key in sorted(failure.suspects) if (member := self._members.get(key)) is not None]
        for member in {id(member.breaker): member for member in here}.values():  # a group has one
            if self._members.on_failure(member, now_s):
                name, code = member.name, failure.error.code
                logger.warning("circuit breaker opened for %s: no new requests for now (last error: %s)", name, code)
                self.counters.breaker_openings[name] += 1

    def _count_started(self, attempt: Attempt, is_first: bool) -> None:
        if is_first and attempt.first_token_s is not None:
            self.counters.ttft.observe(attempt.first_token_s - attempt.generation.created_s)
        self.journal.version += 1
        self.num_waiting -= 1
        for member, new_tokens in self._used(attempt):
            member.load.on_begun(new_tokens)

    def _count_served(self, attempt: Attempt, reason: str) -> None:
        """Count a request that was answered to its end."""
        if self._selector.keeps_answers:
            request = attempt.generation.request
            tokens = request.token_ids + attempt.generation.output.tobytes()
            self._selector.note_answer(tokens, request.prefix_salt, attempt.decode, request.images)
        self.counters.finished[reason] += 1
        self.counters.e2e.observe(self._clock.monotonic() - attempt.generation.created_s)
        for key in (attempt.prefill, attempt.decode):
            if key is not None and (member := self._members.get(key)) is not None:
                self._members.on_success(member)

    def _count_stages(self, record: RequestSnapshot, stages: Stages) -> None:
        on_p = record.prefill or record.decode
        for name, instance in (("admission", record.decode), ("queue", on_p), ("compute", on_p), ("transfer", on_p)):
            span_s = stages.span_s(name)
            if span_s is not None:
                self.counters.stages[name][instance].observe(span_s)

    def _end(self, attempt: Attempt, record: RequestSnapshot, is_news: bool) -> None:
        """Remove an attempt that is over; whatever still comes for its room is stale."""
        del self.rooms[attempt.room]
        self.deferred.pop(attempt.generation, None)
        self._dispatcher.trace.framed.pop(attempt.room, None)
        self.num_tokens -= attempt.num_tokens
        self.journal.add(record)
        if record.stages is not None and record.stages.is_reported:
            self._count_stages(record, record.stages)
        has_begun = attempt.first_token_s is not None
        self.num_waiting -= not has_begun
        for member, new_tokens in self._used(attempt):
            member.load.on_ended(new_tokens, has_begun)
        if (group := attempt.group) is not None:
            group.attempts.remove(attempt)
            if not group.attempts:
                del self.groups[group.room]
        generation, error = attempt.generation, attempt.error
        if error is not None:
            self._count_failure(attempt, error, record)
        elif record.state == "cancelled":
            self.counters.cancelled += 1
        if record.state != "retried":
            if generation.request.files:
                self.files.release(generation.request.files)
            self._deadlines.discard(generation, generation.deadline_s)
            if is_news and not generation.dirty:  # else the reader ended it itself
                generation.dirty = True
                self.dirty.append(generation)

    def _count_failure(self, attempt: Attempt, error: ChituError, record: RequestSnapshot) -> None:
        """Count and log a failed attempt."""
        counters, request_id, num_emitted = self.counters, record.request_id, record.output_tokens
        if record.state != "retried":
            counters.failed[error.code] += 1
            text = "request %s (room %s) failed: %s: %s"
            logger.warning(text, request_id, record.room, error.code, error.message, extra=about(request_id))
            return
        counters.retries[error.code] += 1
        if num_emitted:
            counters.continuations += 1
            counters.recomputed_tokens += record.prompt_tokens + num_emitted
        logger.warning(
            "request %s: attempt %d on %s failed after %d tokens (%s: %s), retrying",
            *(request_id, attempt.number, attempt.pair, num_emitted, error.code, error.message),
            extra=about(request_id),
        )
