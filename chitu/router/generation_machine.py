"""A request on the router as one pure state machine: events and the time in, effects out.

Owned by `Attempts`, which makes the events (on the loop thread), carries out the effects in order, and answers `Choose`
before anything else. It uses no thread, socket, clock, logger or random number. Only `_take` changes a request's state,
by `GENERATION_TRANSITIONS`; a pair that is not in the table changes nothing. `retry.py`, pure too, decides what a
failure means and whether another attempt may follow. Only the first token of an attempt is an event.

Invariants: an attempt has one Begin and one Ended, a request one Ended that is not `retried`. A Cancel precedes every
end that D did not report itself. If another attempt is allowed, it follows the failed one in the same turn and
continues after the tokens received.
"""

from __future__ import annotations

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
    TransferTimeout,
    from_code,
)
from chitu.protocol import Finish
from chitu.protocol.generation_states import GENERATION_AWAITS, GENERATION_TRANSITIONS, GenerationEvent, GenerationState
from chitu.protocol.snapshot import RequestState
from chitu.protocol.states import waited_text
from chitu.router import generation_events as events
from chitu.router.generation import Attempt, Generation
from chitu.router.retry import MAX_DEATHS, Failure, failure_of, may_retry
from chitu.router.routing import InstanceKey, instance_key

_E = GenerationEvent


class GenerationMachine:
    """Keeps only the effects of the running call; all other state is in the `Generation`."""

    def __init__(self, config: RouterConfig) -> None:
        self._retry = config.retry
        self._timeout_s = config.request_timeout_s
        self._now_s = 0.0
        self._effects: list[events.Effect] = []

    def handle(self, generation: Generation, event: events.Event, now_s: float) -> list[events.Effect]:
        """Return what is to be done now, in this order."""
        self._now_s, self._effects = now_s, []
        attempt = generation.attempt
        if isinstance(event, events.PairChosen):
            self._chosen(generation, attempt, event)
        elif attempt is None:
            pass  # it is over, or was sent to no instance
        elif isinstance(event, events.TokensBegan):
            self._started(generation, attempt)
        elif isinstance(event, events.Finished):
            self._finished(generation, attempt, event)
        elif isinstance(event, events.ReaderGone):
            self._reader_gone(generation, attempt, event.is_complete)
        elif isinstance(event, events.NoPair):
            self._no_pair(generation, attempt, event.failure)
        elif isinstance(event, events.AttemptFailed):
            self._reported(generation, attempt, event)
        elif isinstance(event, events.InstanceLost):
            self._lost(generation, attempt, event)
        elif isinstance(event, events.Silent):
            # After one token KV may be missing; a second one proves that it is there.
            if generation.num_emitted <= attempt.num_continued + 1 and attempt.prefill is not None:
                text = f"{attempt.decode.name} receives nothing from {attempt.prefill.name}"
                self._retry_or_keep(generation, attempt, _E.SILENCE, Failure(SilentLink(text), frozenset()))
        elif isinstance(event, events.OutOfTime):
            self._give_up(generation, attempt, self._timeout_of(generation, attempt))
        elif isinstance(event, events.GivenUp):
            self._give_up(generation, attempt, event.error)
        elif isinstance(event, events.NotDelivered):
            self._failed(generation, attempt, event.error, event.reporter, by=_E.STALL)
        else:
            late = TransferTimeout(_waited(generation, attempt, now_s))
            self._failed(generation, attempt, late, attempt.decode, by=_E.STALL)
        return self._effects

    # -------------------------------------------------------------------------------------------------------- internal

    def _take(self, generation: Generation, event: GenerationEvent) -> bool:
        """Move a request to its next state: the only way its state changes. Return False if the event is absorbed."""
        target = GENERATION_TRANSITIONS.get((generation.state, event))
        if target is None:
            return False
        generation.state = target
        return True

    def _chosen(self, generation: Generation, before: Attempt | None, event: events.PairChosen) -> None:
        """Start an attempt in place of the one before, or the first."""
        failure, target = event.failure, event.target
        pair = instance_key(target.prefill) if target.prefill is not None else None, instance_key(target.decode)
        if before is not None:
            if failure is None:
                return
            is_refused = failure.needs_others and not failure.suspects.isdisjoint(pair)
            if is_refused or (event.is_cut_off and isinstance(failure.error, SilentLink)):
                self._no_pair(generation, before, failure)
                return
        if not self._take(generation, _E.CHOSEN):
            return
        if before is not None and failure is not None:
            generation.record.note(failure, before.has_progressed)
            before.error = failure.error
            self._effects.append(events.Cancel(before))
            self._end(generation, before, "retried")
        attempt = Attempt(
            room=event.room,
            target=target,
            generation=generation,
            prefill=pair[0],
            decode=pair[1],
            created_s=self._now_s,
            number=len(generation.ended) + 1,
            token_ids=event.token_ids,
            num_continued=generation.num_emitted,
            group=event.group,
            is_group_leader=event.group is None or not event.group.attempts,
        )
        if event.group is not None:
            event.group.attempts.append(attempt)
        generation.attempt, generation.noted = attempt, False
        self._effects.append(events.Begin(attempt))

    def _no_pair(self, generation: Generation, attempt: Attempt, failure: Failure) -> None:
        if self._take(generation, _E.NO_PAIR):
            self._fail(generation, attempt, failure.error)

    def _started(self, generation: Generation, attempt: Attempt) -> None:
        if not self._take(generation, _E.FIRST_TOKEN):
            return
        attempt.first_token_s = self._now_s
        generation.cached_tokens = min(attempt.cached_tokens, generation.request.num_tokens)
        is_first = generation.first_token_s is None
        if is_first:
            generation.first_token_s = generation.woken_s = self._now_s
            generation.first_prefill = attempt.prefill
        self._effects.append(events.NoteStarted(attempt, is_first))

    def _finished(self, generation: Generation, attempt: Attempt, event: events.Finished) -> None:
        finish = event.finish
        if finish.reason not in ("stop", "length"):
            error: ChituError = from_code(finish.code, finish.message)
            if finish.reason != "error":
                error = Internal(f"{attempt.decode.name} ended the request as {finish.reason!r} on its own")
            self._reported(generation, attempt, events.AttemptFailed(error, attempt.decode, event.is_prefill_here))
        elif self._take(generation, _E.FINISH):
            self._effects.append(events.NoteServed(attempt, finish.reason, finish.stages))
            generation.finish = finish
            self._end(generation, attempt, "finished")

    def _reader_gone(self, generation: Generation, attempt: Attempt, is_complete: bool) -> None:
        if not self._take(generation, _E.FINISH if is_complete else _E.CANCEL):
            return
        if is_complete:
            self._effects.append(events.NoteServed(attempt, "stop"))
        generation.error = RequestCancelled("the request was cancelled")
        self._effects.append(events.Cancel(attempt))
        self._end(generation, attempt, "finished" if is_complete else "cancelled", is_news=False)

    def _lost(self, generation: Generation, attempt: Attempt, event: events.InstanceLost) -> None:
        key, name, dead = event.key, event.key.name, event.key if event.has_died else None
        if attempt.decode == key:
            error = DecodeLost(f"{name} is gone ({event.reason}) and took this request with it")
            self._failed(generation, attempt, error, key, dead)
        elif attempt.prefill == key:
            lost = PrefillLost(f"{name} is gone ({event.reason})")
            self._retry_or_keep(generation, attempt, _E.PREFILL_LOST, failure_of(lost, key, key, attempt.decode, dead))
            if event.has_died:
                self._take(generation, _E.PREFILL_DIED)

    # ------------------------------------------------------------------------------------------- failures, and the end

    def _reported(self, generation: Generation, attempt: Attempt, event: events.AttemptFailed) -> None:
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
        if not self._take(generation, by):
            return
        failure = failure_of(error, reporter, attempt.prefill, attempt.decode, dead)
        if failure.is_fault and attempt.is_group_leader:
            self._effects.append(events.Blame(failure))
        self._retry_or_finish(generation, attempt, failure)

    def _retry_or_keep(self, generation: Generation, attempt: Attempt, by: GenerationEvent, failure: Failure) -> None:
        """Retry elsewhere if possible. Else keep the attempt: what it waits for may come, and it has its deadlines. No
        breaker counts this."""
        if self._take(generation, by):
            self._retry_or_finish(generation, attempt, failure)

    def _retry_or_finish(self, generation: Generation, attempt: Attempt, failure: Failure) -> None:
        """Seek another pair. A request that has every token is finished instead, and one that kills instances ends."""
        record = generation.record
        if reason := generation.end_reason():  # nothing is missing but the end itself
            self._take(generation, _E.FINISH)
            self._effects += (events.Cancel(attempt), events.NoteServed(attempt, reason))
            generation.finish = Finish(attempt.room, reason)
            self._end(generation, attempt, "finished")
            return
        if failure.dead is not None:
            record.note_death(failure.dead, (attempt.prefill, attempt.decode))
            if record.deaths >= MAX_DEATHS:
                text = f"{record.deaths} instances died one after the other while they had this request"
                text += f", {failure.dead.name} last: it is not sent to another"
                self._give_up(generation, attempt, PoisonRequest(text))
                return
        left_s = generation.deadline_s - self._now_s
        if may_retry(failure, self._retry, record, generation.num_emitted, attempt.has_progressed, left_s):
            token_ids = generation.request.token_ids + generation.output.tobytes()
            self._effects.append(events.Choose(token_ids, record.avoid | failure.suspects, failure))
        else:
            self._no_pair(generation, attempt, failure)

    def _give_up(self, generation: Generation, attempt: Attempt, error: ChituError) -> None:
        if self._take(generation, _E.GIVE_UP):
            self._fail(generation, attempt, error)

    def _fail(self, generation: Generation, attempt: Attempt, error: ChituError) -> None:
        """End the request with this error. The instances may still compute or hold pages for it."""
        attempt.error = generation.error = error
        self._effects.append(events.Cancel(attempt))
        self._end(generation, attempt, "failed")

    def _end(self, generation: Generation, attempt: Attempt, state: RequestState, is_news: bool = True) -> None:
        record = attempt.snapshot(state, self._now_s)
        generation.ended.append(record)
        generation.attempt = None
        self._effects.append(events.Ended(attempt, record, is_news))

    def _timeout_of(self, generation: Generation, attempt: Attempt) -> RequestTimeout:
        limit_s = generation.deadline_s - generation.created_s
        whose = "router.request_timeout_s" if limit_s >= self._timeout_s else "X-Request-Timeout"
        waited = _waited(generation, attempt, self._now_s)
        return RequestTimeout(f"not finished within {limit_s:g} s ({whose}): {waited}")


def _dead_by_report(state: GenerationState, attempt: Attempt, event: events.AttemptFailed) -> InstanceKey | None:
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
