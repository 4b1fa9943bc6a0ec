"""What follows when something happens to a request on the router: a pure machine.

Owned by `Attempts`, which makes the events on the loop thread, carries out the effects in order, and answers `Choose`
before anything else. Only `_enter` changes a request's state, by `GENERATION_TRANSITIONS` (`generation.py`).
`retry.py` decides what a failure means.

Invariants: a request ends once. An attempt that failed is followed by another or by the end, in the same turn, and the
next one continues after the tokens received. An attempt has one Begin and one Ended, a request one Ended that is not
`retried`. A Cancel precedes every end that D did not report itself. Every state in which an attempt runs has the
request's deadline. How long an attempt may wait for its first token is the business of P and D, which know whether it
advances; a link delivers what they report (`net/link.py`), and a lease ends with them.
"""

from __future__ import annotations

from typing import Union

from msgspec import Struct

from chitu.config.schema import RouterConfig
from chitu.errors import (
    ChituError,
    DecodeLost,
    Internal,
    PoisonRequest,
    PrefillLost,
    RequestCancelled,
    RequestTimeout,
    SilentLink,
    WeightsChanged,
    from_code,
)
from chitu.protocol import Finish
from chitu.protocol.account import RequestSnapshot, RequestState, total_drafts
from chitu.router.candidates import NO_GROUPS, Groups, InstanceKey, Way, instance_key, with_groups
from chitu.router.generation import (
    GENERATION_AWAITS,
    GENERATION_TRANSITIONS,
    Attempt,
    Generation,
    GenerationEvent,
    GenerationState,
    PromptGroup,
)
from chitu.router.retry import DEADLINES, MAX_DEATHS, Failure, failure_of, may_retry
from chitu.types import waited_text

_E = GenerationEvent


class Event(Struct):
    """What happened to a request."""


class PairChosen(Event):
    """A pair for the first attempt, or the answer to `Choose`, with the `failure` and `token_ids` of that."""

    way: Way
    room: bytes
    token_ids: bytes
    failure: Failure | None = None
    is_cut_off: bool = False
    """D receives nothing from P."""
    group: PromptGroup | None = None
    groups: Groups = NO_GROUPS
    """Groups of the pair's instances."""


class NoPair(Event):
    """The answer to `Choose` if no pair can serve."""

    failure: Failure


class TokenCameEarly(Event):
    """The present attempt received its first token from P."""


class TokensBegan(Event):
    """The present attempt received its first token from D."""


class Finished(Event):
    """D reported the end of the room."""

    finish: Finish
    is_prefill_here: bool = False
    """P is a member of the cluster."""


class AttemptFailed(Event):
    """An attempt failed. `reporter` is its P or D, or the instance that the router itself found at fault."""

    error: ChituError
    reporter: InstanceKey
    is_peer_here: bool = False
    """The other instance of the pair is a member."""


class NotDelivered(Event):
    """A half of the request does not reach its instance. Ignored after D's first token, which took both halves."""

    error: ChituError
    reporter: InstanceKey


class InstanceLost(Event):
    """An instance left, was silent for too long, or died."""

    key: InstanceKey
    reason: str
    has_died: bool


class Silent(Event):
    """D receives nothing from P."""


class OutOfTime(Event):
    """The request's own deadline passed."""


class GivenUp(Event):
    """The request is ended because the router's process ends."""

    error: ChituError


class ReaderGone(Event):
    """The client left, or `is_complete`: it has its whole answer (a stop string was found)."""

    is_complete: bool


class Begin(Struct):
    """Send an attempt, unless its group is sent as one."""

    attempt: Attempt


class Choose(Struct):
    """Find a pair for these tokens: PairChosen or NoPair is the answer, now or once requests need not wait."""

    token_ids: bytes
    avoid: frozenset[InstanceKey]
    failure: Failure


class CountStarted(Struct):
    """An attempt received its first token; `is_first`: it is also the first of the request."""

    attempt: Attempt
    is_first: bool


class Blame(Struct):
    """Count a failure in the circuit breakers of its suspects."""

    failure: Failure


class Cancel(Struct):
    """Cancel an attempt on both instances."""

    attempt: Attempt


class CountServed(Struct):
    """A request was answered to its end."""

    attempt: Attempt
    reason: str


class Ended(Struct):
    """An attempt is over, and so is its request unless the record is `retried`. `is_news`: the reader does not know
    yet."""

    attempt: Attempt
    record: RequestSnapshot
    is_news: bool = True


Effect = Union[Begin, Choose, CountStarted, Blame, Cancel, CountServed, Ended]


class GenerationMachine:
    """Keeps only the effects of the running call; all other state is in the `Generation`."""

    def __init__(self, config: RouterConfig) -> None:
        self._retry = config.retry
        self._timeout_s = config.request_timeout_s
        self._now_s = 0.0
        self._effects: list[Effect] = []

    def handle(self, generation: Generation, event: Event, now_s: float) -> list[Effect]:
        """Return the effects, in order."""
        self._now_s, self._effects = now_s, []
        attempt = generation.attempt
        if isinstance(event, PairChosen):
            self._chosen(generation, attempt, event)
        elif attempt is None:
            pass  # it is over, or was sent to no instance
        elif isinstance(event, TokenCameEarly):
            if self._enter(generation, _E.EARLY_TOKEN):
                attempt.is_early = True
                self._started(generation, attempt)
        elif isinstance(event, TokensBegan):
            if self._enter(generation, _E.FIRST_TOKEN) and not attempt.is_early:
                self._started(generation, attempt)
        elif isinstance(event, Finished):
            self._finished(generation, attempt, event)
        elif isinstance(event, ReaderGone):
            self._reader_gone(generation, attempt, event.is_complete)
        elif isinstance(event, NoPair):
            self._no_pair(generation, attempt, event.failure)
        elif isinstance(event, AttemptFailed):
            self._reported(generation, attempt, event)
        elif isinstance(event, InstanceLost):
            self._lost(generation, attempt, event)
        elif isinstance(event, Silent):
            # After one token KV may be missing; a second one proves that it is there.
            if generation.num_emitted <= attempt.num_continued + 1 and attempt.prefill is not None:
                text = f"{attempt.decode.name} receives nothing from {attempt.prefill.name}"
                self._retry_or_keep(generation, attempt, _E.SILENCE, Failure(SilentLink(text), frozenset()))
        elif isinstance(event, OutOfTime):
            self._give_up(generation, attempt, self._timeout_of(generation, attempt))
        elif isinstance(event, GivenUp):
            self._give_up(generation, attempt, event.error)
        elif isinstance(event, NotDelivered):
            self._failed(generation, attempt, event.error, event.reporter, by=_E.STALL)
        return self._effects

    # -------------------------------------------------------------------------------------------------------- internal

    def _enter(self, generation: Generation, event: GenerationEvent) -> bool:
        """Move a request to its next state: the only way its state changes. Return False if the event is absorbed."""
        target = GENERATION_TRANSITIONS.get((generation.state, event))
        if target is None:
            return False
        generation.state = target
        return True

    def _chosen(self, generation: Generation, before: Attempt | None, event: PairChosen) -> None:
        """Start an attempt in place of the one before, or the first."""
        failure, way = event.failure, event.way
        pair = instance_key(way.prefill) if way.prefill is not None else None, instance_key(way.decode)
        if before is not None:
            if failure is None:
                return
            is_refused = failure.needs_others and not failure.suspects.isdisjoint(pair)
            if is_refused or (event.is_cut_off and isinstance(failure.error, SilentLink)):
                self._no_pair(generation, before, failure)
                return
            changed = _other_weights(generation, before, way) or generation.why_other_adapter(way.decode)
            if changed is not None:
                self._no_pair(generation, before, Failure(changed, frozenset()))
                return
        if not self._enter(generation, _E.CHOSEN):
            return
        generation.note_weights(way.decode.model_hash)
        if name := generation.request.options.adapter:
            generation.adapter_hash = way.decode.adapter_hash(name)
        if before is not None and failure is not None:
            generation.record.add(failure, before.has_progressed)
            before.error = failure.error
            self._effects.append(Cancel(before))
            self._end(generation, before, "retried")
        attempt = Attempt(
            room=event.room,
            way=way,
            generation=generation,
            prefill=pair[0],
            decode=pair[1],
            created_s=self._now_s,
            number=len(generation.ended) + 1,
            token_ids=event.token_ids,
            num_continued=generation.num_emitted,
            groups=event.groups,
            group=event.group,
            is_group_leader=event.group is None or not event.group.attempts,
        )
        if event.group is not None:
            event.group.attempts.append(attempt)
        generation.attempt, generation.needs_no_wake = attempt, False
        self._effects.append(Begin(attempt))

    def _no_pair(self, generation: Generation, attempt: Attempt, failure: Failure) -> None:
        if self._enter(generation, _E.NO_PAIR):
            if isinstance(failure.error, DEADLINES):
                failure.error.retry_after_s = self._now_s - attempt.created_s
            self._fail(generation, attempt, failure.error)

    def _started(self, generation: Generation, attempt: Attempt) -> None:
        attempt.first_token_s = self._now_s
        generation.cached_tokens = min(attempt.cached_tokens, generation.request.num_tokens)
        is_first = generation.first_token_s is None
        if is_first:
            generation.first_token_s = generation.woken_s = self._now_s
        self._effects.append(CountStarted(attempt, is_first))

    def _finished(self, generation: Generation, attempt: Attempt, event: Finished) -> None:
        finish = event.finish
        if finish.drafts:
            attempt.drafts = finish.drafts
            generation.drafts = total_drafts((generation.drafts, finish.drafts))
        if finish.reason not in ("stop", "length"):
            error: ChituError = from_code(finish.code, finish.message)
            if finish.reason != "error":
                error = Internal(f"{attempt.decode.name} ended the request as {finish.reason!r} on its own")
            self._reported(generation, attempt, AttemptFailed(error, attempt.decode, event.is_prefill_here))
        elif self._enter(generation, _E.FINISH):
            self._effects.append(CountServed(attempt, finish.reason))
            generation.finish = finish
            self._end(generation, attempt, "finished")

    def _reader_gone(self, generation: Generation, attempt: Attempt, is_complete: bool) -> None:
        if not self._enter(generation, _E.FINISH if is_complete else _E.CANCEL):
            return
        if is_complete:
            self._effects.append(CountServed(attempt, "stop"))
        generation.error = RequestCancelled("the request was cancelled")
        self._effects.append(Cancel(attempt))
        self._end(generation, attempt, "finished" if is_complete else "cancelled", is_news=False)

    def _lost(self, generation: Generation, attempt: Attempt, event: InstanceLost) -> None:
        key, name, dead = event.key, event.key.name, event.key if event.has_died else None
        if attempt.decode == key:
            error = DecodeLost(f"{name} is gone ({event.reason}); this request was lost with it")
            self._failed(generation, attempt, error, key, dead)
        elif attempt.prefill == key:
            lost = PrefillLost(f"{name} is gone ({event.reason})")
            failure = failure_of(lost, key, key, attempt.decode, dead, attempt.groups)
            self._retry_or_keep(generation, attempt, _E.PREFILL_LOST, failure)
            if event.has_died:
                self._enter(generation, _E.PREFILL_DIED)

    # ------------------------------------------------------------------------------------------- failures, and the end

    def _reported(self, generation: Generation, attempt: Attempt, event: AttemptFailed) -> None:
        dead = _dead_by_report(generation.state, attempt, event)
        self._failed(generation, attempt, event.error, event.reporter, dead)

    def _failed(
        self,
        generation: Generation,
        attempt: Attempt,
        error: ChituError,
        reporter: InstanceKey,
        dead: InstanceKey | None = None,
        by: GenerationEvent = _E.FAIL,
    ) -> None:
        """End the attempt. Its request continues with another one, or ends with this error."""
        if not self._enter(generation, by):
            return
        failure = failure_of(error, reporter, attempt.prefill, attempt.decode, dead, attempt.groups)
        if failure.is_fault and attempt.is_group_leader:
            self._effects.append(Blame(failure))
        self._retry_or_finish(generation, attempt, failure)

    def _retry_or_keep(self, generation: Generation, attempt: Attempt, by: GenerationEvent, failure: Failure) -> None:
        """Retry elsewhere if possible. Else keep the attempt: what it waits for may come, and it has its deadlines. No
        breaker counts this."""
        if self._enter(generation, by):
            self._retry_or_finish(generation, attempt, failure)

    def _retry_or_finish(self, generation: Generation, attempt: Attempt, failure: Failure) -> None:
        """Seek another pair. A request that has every token is finished instead, and one that kills instances ends."""
        record = generation.record
        if reason := generation.end_reason():  # nothing is missing but the end itself
            self._enter(generation, _E.FINISH)
            self._effects += (Cancel(attempt), CountServed(attempt, reason))
            generation.finish = Finish(attempt.room, reason)
            self._end(generation, attempt, "finished")
            return
        if failure.dead is not None:
            record.add_death(failure.dead, with_groups((attempt.prefill, attempt.decode), attempt.groups))
            if record.deaths >= MAX_DEATHS:
                text = f"{record.deaths} instances died one after the other while they had this request"
                text += f", {failure.dead.name} last: it is not sent to another"
                self._give_up(generation, attempt, PoisonRequest(text))
                return
        left_s = generation.deadline_s - self._now_s
        if may_retry(failure, self._retry, record, generation.num_emitted, attempt.has_progressed, left_s):
            token_ids = generation.request.token_ids + generation.output.tobytes()
            self._effects.append(Choose(token_ids, record.avoid | failure.suspects, failure))
        else:
            self._no_pair(generation, attempt, failure)

    def _give_up(self, generation: Generation, attempt: Attempt, error: ChituError) -> None:
        if self._enter(generation, _E.GIVE_UP):
            self._fail(generation, attempt, error)

    def _fail(self, generation: Generation, attempt: Attempt, error: ChituError) -> None:
        """End the request with this error. The instances may still compute or hold pages for it."""
        attempt.error = generation.error = error
        self._effects.append(Cancel(attempt))
        self._end(generation, attempt, "failed")

    def _end(self, generation: Generation, attempt: Attempt, state: RequestState, is_news: bool = True) -> None:
        record = attempt.snapshot(state, self._now_s)
        generation.ended.append(record)
        generation.attempt = None
        self._effects.append(Ended(attempt, record, is_news))

    def _timeout_of(self, generation: Generation, attempt: Attempt) -> RequestTimeout:
        limit_s = generation.deadline_s - generation.created_s
        whose = "router.request_timeout_s" if limit_s >= self._timeout_s else "X-Request-Timeout"
        waited = _waited(generation, attempt, self._now_s)
        return RequestTimeout(f"not finished within {limit_s:g} s ({whose}): {waited}")


def _other_weights(generation: Generation, before: Attempt, way: Way) -> WeightsChanged | None:
    """Return why a request with tokens cannot go on there: it would have tokens of two models, which only a mixed
    change allows. None if it can."""
    old, new = before.way.decode.weights, way.decode.weights
    if not generation.num_emitted or new.goes_on_from(old):
        return None
    return WeightsChanged(
        f"{generation.num_emitted} tokens were computed with weights {old.number}, and the cluster serves {new.number}"
    )


def _dead_by_report(state: GenerationState, attempt: Attempt, event: AttemptFailed) -> InstanceKey | None:
    """Return the instance whose process the other half of the pair saw end, else None. If the router knew of the loss
    first, it already knows whether that was a death."""
    error, reporter = event.error, event.reporter
    if isinstance(error, PrefillLost) and reporter == attempt.decode:
        return attempt.prefill if event.is_peer_here or state is GenerationState.DECODE_ALONE else None
    return (
        attempt.decode if isinstance(error, DecodeLost) and reporter == attempt.prefill and event.is_peer_here else None
    )


def _waited(generation: Generation, attempt: Attempt, now_s: float) -> str:
    since_s = attempt.created_s if attempt.first_token_s is None else attempt.first_token_s
    what = GENERATION_AWAITS[generation.state].format(peer=attempt.pair)
    return waited_text(f"attempt {attempt.number}", now_s - since_s, generation.state, what)
