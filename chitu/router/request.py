"""A request on the router: its record, its states, and the pure machine that decides what follows.

Owned by `Attempts`, which makes the events on the loop thread, carries out the effects in order, and answers `Choose`
before anything else. The HTTP layer reads a `Generation` after each `wake`. Only `_enter` changes a request's state, by
`GENERATION_TRANSITIONS` (docs/protocol.md shows it). `retry.py` decides what a failure means.

Invariants: a request ends once. An attempt that failed is followed by another or by the end, in the same turn, and the
next one continues after the tokens received. An attempt has one Begin and one Ended, a request one Ended that is not
`retried`. A Cancel precedes every end that D did not report itself. Every state in which an attempt runs has the
request's deadline. How long an attempt may wait for its first token is the business of P and D, which know whether it
advances; a link delivers what they report (`net/link.py`), and a lease ends with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, Union

from msgspec import UNSET, Struct

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
from chitu.protocol import Finish, Fork, SamplingParams, TraceLevel
from chitu.protocol.account import RequestSnapshot, RequestState, Stages, attempt_stages
from chitu.router.costs import NO_SLO, SLO
from chitu.router.policies import InstanceKey, Target, instance_key
from chitu.router.retry import DEADLINES, MAX_DEATHS, Failure, FailureHistory, failure_of, may_retry
from chitu.types import room_text, waited_text


class GenerationState(Enum):
    """State of a request, over all of its attempts: tries on one pair (or unified instance) each."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    ASKED = auto()
    """It was not sent to any instance yet."""
    PREFILL = auto()
    """An attempt was dispatched, and has no token yet."""
    DECODE = auto()
    """The attempt emits tokens."""
    DECODE_ALONE = auto()
    """As DECODE, but P's process died after the first token: D knows whether all KV had landed, and reports it if
    not."""
    RETRYING = auto()
    """The attempt failed, and it is not decided yet whether another one follows or the request ends."""
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class GenerationEvent(Enum):
    __hash__ = object.__hash__

    CHOSEN = auto()
    """A pair was found for the first or for another attempt."""
    FIRST_TOKEN = auto()
    """The present attempt received its first token."""
    PREFILL_DIED = auto()
    """P's process ended."""
    FAIL = auto()
    """The present attempt failed."""
    STALL = auto()
    """The attempt has no token and none can come: a half did not reach its instance."""
    PREFILL_LOST = auto()
    """P left, was silent for too long or died. An attempt without a token moves if there is another pair, else it
    stays."""
    SILENCE = auto()
    """D receives nothing from P, and KV may be missing. The attempt moves if there is another pair, else it stays."""
    NO_PAIR = auto()
    """No other attempt may follow, or no instance can take it."""
    FINISH = auto()
    """Every token was received."""
    GIVE_UP = auto()
    """The request is out of time, is poison, or the process ends."""
    CANCEL = auto()
    """The request has no reader any more."""


_S, _E = GenerationState, GenerationEvent
RUNNING: Final = (_S.PREFILL, _S.DECODE, _S.DECODE_ALONE)
"""States in which an attempt runs."""

GENERATION_TRANSITIONS: Final[Mapping[tuple[GenerationState, GenerationEvent], GenerationState]] = {
    (_S.ASKED, _E.CHOSEN): _S.PREFILL,
    (_S.PREFILL, _E.FIRST_TOKEN): _S.DECODE,
    (_S.DECODE, _E.PREFILL_DIED): _S.DECODE_ALONE,
    (_S.PREFILL, _E.STALL): _S.RETRYING,
    (_S.PREFILL, _E.PREFILL_LOST): _S.PREFILL,
    **{(state, _E.SILENCE): state for state in RUNNING},
    **{(state, _E.FAIL): _S.RETRYING for state in RUNNING},
    **{(state, _E.CHOSEN): _S.PREFILL for state in (*RUNNING, _S.RETRYING)},
    (_S.RETRYING, _E.NO_PAIR): _S.FAILED,
    **{(state, _E.FINISH): _S.FINISHED for state in (*RUNNING, _S.RETRYING)},
    **{(state, _E.GIVE_UP): _S.FAILED for state in (*RUNNING, _S.RETRYING)},
    **{(state, _E.CANCEL): _S.CANCELLED for state in (*RUNNING, _S.RETRYING)},
}
"""(state, event) -> next state; a pair that is not here is absorbed."""

GENERATION_AWAITS: Final[Mapping[GenerationState, str]] = {
    GenerationState.PREFILL: "the first token of {peer}",
    GenerationState.DECODE: "the last token of {peer}",
    GenerationState.DECODE_ALONE: "the last token of {peer}",
    GenerationState.RETRYING: "another pair than {peer}",
}
"""Event that a request waits for in each state that a clock ends."""


class GenerateRequest(Struct):
    """What one choice of one prompt asks for, with every default resolved."""

    request_id: str
    """A label for logs; never a key."""
    token_ids: bytes
    """Prompt, int32 LE."""
    num_tokens: int
    """Prompt tokens."""
    sampling: SamplingParams
    wake_per_token: bool = True
    """False: `wake` is called only at the end, because the reader needs no tokens before."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the output: the request's stop ids, and eos unless it is ignored."""
    timeout_s: float | None = None
    """The client's own timeout, if it has one; `router.request_timeout_s` is the upper bound."""
    cache_salt: str | None = ""
    """Prompts share cached pages only if their salts are equal. None: this request uses no cached page, and leaves
    none."""
    priority: int = 0
    """The lowest value goes first, wherever requests wait on P and D, within limits (`queue_order`)."""
    tenant: str = ""
    """Tenant that may see the request; empty if the router has no API keys, or if no client asked."""
    trace: TraceLevel = ""
    """Whether P and D record their work on it."""
    adapter: str = ""
    """Name of its LoRA adapter; empty: none."""
    slo: SLO = NO_SLO
    """The client's own targets for its tokens."""

    @property
    def prefix_salt(self) -> str | None:
        """What its prompt shares with others whose cached pages it may use; None if it uses none."""
        return f"{self.adapter}\0{self.cache_salt}" if self.adapter and self.cache_salt is not None else self.cache_salt


class PromptGroup(Struct, eq=False):
    """Choices of one prompt that are sent as one request: the prompt is computed once and moved once."""

    room: bytes
    """Room of the prompt. P sees no other, and D reports on the prompt by it."""
    attempts: list[Attempt] = []
    """Attempts of the group that are not over."""

    @property
    def forks(self) -> tuple[Fork, ...]:
        """The choices as D receives them."""
        requests = [(attempt.room, attempt.generation.request) for attempt in self.attempts]
        return tuple(Fork(room, request.request_id, request.sampling.seed) for room, request in requests)


class Attempt(Struct, eq=False):
    """One attempt of a generation on one pair."""

    room: bytes
    target: Target
    generation: Generation
    prefill: InstanceKey | None
    """None if one instance does both halves: a unified one, or a D that computes the prompt."""
    decode: InstanceKey
    created_s: float
    number: int = 1
    """1 for the first attempt of its generation."""
    token_ids: bytes = b""
    """What is prefilled, int32 LE: the prompt, then the output that earlier attempts emitted."""
    num_continued: int = 0
    """Output tokens of earlier attempts, at the end of `token_ids`."""
    first_token_s: float | None = None
    cached_tokens: int = 0
    """Prefilled tokens that were in cached pages and needed no computing; known with the first token."""
    error: ChituError | None = None
    """Why it failed; its generation may go on with another attempt."""
    group: PromptGroup | None = None
    """None if the attempt was sent alone."""
    is_group_leader: bool = True
    """Whether this attempt stands for its group where prompts and failures of instances are counted."""

    @property
    def has_progressed(self) -> bool:
        """Whether a token came that no earlier attempt had brought."""
        return self.generation.num_emitted > self.num_continued

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def pair(self) -> str:
        """`P0-D1`, or `U0`."""
        prefill, decode = self.target.prefill, self.target.decode
        name = decode.name
        return name if prefill is None else f"{prefill.name}-{name}"

    def _stages(self, ended_s: float) -> Stages:
        finish = self.generation.finish
        # All zeros if the last token came, but D's report of the end did not.
        report = finish.stages if finish is not None and finish.stages.total_s else None
        return attempt_stages(self.created_s, self.first_token_s, ended_s, report, is_pair=self.prefill is not None)

    def snapshot(self, state: RequestState | None = None, ended_s: float | None = None) -> RequestSnapshot:
        """Return its record. `state` is None while it runs."""
        generation = self.generation
        prefill, decode, finish = self.target.prefill, self.target.decode, generation.finish
        return RequestSnapshot(
            room=room_text(self.room),
            request_id=generation.request.request_id,
            prefill=None if prefill is None else prefill.name,
            decode=decode.name,
            state=state or ("prefill" if generation.state is GenerationState.PREFILL else "decode"),
            prompt_tokens=generation.request.num_tokens,
            output_tokens=generation.num_emitted,
            created_at_s=self.created_s,
            first_token_at_s=self.first_token_s,
            ended_at_s=ended_s,
            kv_bytes=finish.kv_bytes if finish is not None else 0,
            stages=None if ended_s is None else self._stages(ended_s),
            error=self.error.code if self.error is not None else "",
            attempt=self.number,
            continued_tokens=self.num_continued,
            cached_tokens=self.cached_tokens,
            prompt_room=room_text(self.group.room) if self.group is not None else UNSET,
            tenant=generation.request.tenant or UNSET,
        )


@dataclass(slots=True, eq=False)
class Generation:
    """One request's output as it comes in. The HTTP layer reads it after each `wake`. Not a struct, as the other
    records of a request are: it is written eight times a token, and a struct's field takes twice as long to write."""

    request: GenerateRequest
    wake: Callable[[], None]
    deadline_s: float
    created_s: float
    state: GenerationState = GenerationState.ASKED
    """Only `GenerationMachine` writes it, as it does the attempts."""
    first_token_s: float | None = None
    num_woken: int = 1
    """Number of tokens for which the reader was already woken; `woken_s` is when. The first token counts in
    `first_token_s`."""
    woken_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    """Tokens not taken by the reader yet."""
    logprobs: list[bytes] = field(default_factory=list)
    """Packed logprobs of tokens that were received and not taken yet; empty if the request asks for none."""
    kept_logprobs: list[bytes] | None = None
    """Logprobs that were taken, if the request may outlive the router."""
    prompt_logprobs: bytes | None = None
    """Logprobs of the prompt, from its first token until they are taken."""
    is_checked: bool = False
    """Whether a cross-check wants `logprobs`, of the first token only; the reader did not ask for them."""
    first_prefill: InstanceKey | None = None
    """P whose logits the first token was drawn from."""
    num_taken: int = 0
    taken: array[int] = field(default_factory=partial(array, "i"))
    """Tokens that the reader has taken: another D may have to continue after them."""
    cached_tokens: int = 0
    """Prompt tokens that the newest attempt with a token did not have to compute."""
    weights: list[tuple[int, str]] = field(default_factory=list)
    """Hashes of the models that its tokens are of, each with the index of its first token: one, unless weights changed
    under it (a mixed change)."""
    finish: Finish | None = None
    error: ChituError | None = None
    attempt: Attempt | None = None
    """The present attempt; None once the request is over."""
    ended: list[RequestSnapshot] = field(default_factory=list)
    """Records of its attempts that are over, in order."""
    record: FailureHistory = field(default_factory=FailureHistory)
    """Account of its failed attempts."""
    dirty: bool = False
    """`wake` is due at the next `flush`."""
    needs_no_wake: bool = False
    """The next token only needs to be appended: `wake` is due already, or is not asked for."""

    @property
    def done(self) -> bool:
        return self.attempt is None

    @property
    def num_attempts(self) -> int:
        """Number of attempts, the present one included."""
        return len(self.ended) + (self.attempt is not None)

    def attempts(self) -> list[RequestSnapshot]:
        """Return the records of all attempts, the present one last; never empty."""
        return self.ended if self.attempt is None else [*self.ended, self.attempt.snapshot()]

    @property
    def num_emitted(self) -> int:
        """Tokens received so far, over all attempts."""
        return self.num_taken + len(self.tokens)

    @property
    def output(self) -> array[int]:
        """All tokens received so far, as a new array."""
        return self.taken + array("i", self.tokens)

    def take(self, most: int | None = None) -> list[int]:
        """Return the tokens received since the last call, `most` of them or all."""
        taken, self.tokens = self.tokens, []
        if most is not None and len(taken) > most:
            taken, self.tokens = taken[:most], taken[most:]
        self.num_taken += len(taken)
        self.taken.extend(taken)
        return taken

    def take_logprobs(self, most: int | None = None) -> list[bytes]:
        """Return the logprobs received since the last call, one per token, `most` of them or all."""
        taken, self.logprobs = self.logprobs, []
        if most is not None and len(taken) > most:
            taken, self.logprobs = taken[:most], taken[most:]
        if self.kept_logprobs is not None:
            self.kept_logprobs += taken
        return taken

    def note_weights(self, model_hash: str) -> None:
        """Note the hash of the model that the tokens from now on are of."""
        first = self.num_emitted
        if self.weights and self.weights[-1][0] == first:
            self.weights.pop()
        if not self.weights or self.weights[-1][1] != model_hash:
            self.weights.append((first, model_hash))

    def end_reason(self) -> str:
        """Return why the newest token is the last one, as D would report it; empty if more are to come."""
        output = self.output
        if output and output[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(output) >= self.request.sampling.max_tokens else ""


class Event(Struct):
    """What happened to a request."""


class PairChosen(Event):
    """A pair for the first attempt, or the answer to `Choose`, with the `failure` and `token_ids` of that."""

    target: Target
    room: bytes
    token_ids: bytes
    failure: Failure | None = None
    is_cut_off: bool = False
    """D receives nothing from P."""
    group: PromptGroup | None = None


class NoPair(Event):
    """The answer to `Choose` if no pair can serve."""

    failure: Failure


class TokensBegan(Event):
    """The present attempt received its first token."""


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
    """A half of the request does not reach its instance. Ignored after the first token, which took both halves."""

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
        elif isinstance(event, TokensBegan):
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
        failure, target = event.failure, event.target
        pair = instance_key(target.prefill) if target.prefill is not None else None, instance_key(target.decode)
        if before is not None:
            if failure is None:
                return
            is_refused = failure.needs_others and not failure.suspects.isdisjoint(pair)
            if is_refused or (event.is_cut_off and isinstance(failure.error, SilentLink)):
                self._no_pair(generation, before, failure)
                return
            if (changed := _other_weights(generation, before, target)) is not None:
                self._no_pair(generation, before, Failure(changed, frozenset()))
                return
        if not self._enter(generation, _E.CHOSEN):
            return
        generation.note_weights(target.decode.model_hash)
        if before is not None and failure is not None:
            generation.record.add(failure, before.has_progressed)
            before.error = failure.error
            self._effects.append(Cancel(before))
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
        generation.attempt, generation.needs_no_wake = attempt, False
        self._effects.append(Begin(attempt))

    def _no_pair(self, generation: Generation, attempt: Attempt, failure: Failure) -> None:
        if self._enter(generation, _E.NO_PAIR):
            if isinstance(failure.error, DEADLINES):
                failure.error.retry_after_s = self._now_s - attempt.created_s
            self._fail(generation, attempt, failure.error)

    def _started(self, generation: Generation, attempt: Attempt) -> None:
        if not self._enter(generation, _E.FIRST_TOKEN):
            return
        attempt.first_token_s = self._now_s
        generation.cached_tokens = min(attempt.cached_tokens, generation.request.num_tokens)
        is_first = generation.first_token_s is None
        if is_first:
            generation.first_token_s = generation.woken_s = self._now_s
            generation.first_prefill = attempt.prefill
        self._effects.append(CountStarted(attempt, is_first))

    def _finished(self, generation: Generation, attempt: Attempt, event: Finished) -> None:
        finish = event.finish
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
            self._retry_or_keep(generation, attempt, _E.PREFILL_LOST, failure_of(lost, key, key, attempt.decode, dead))
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
        failure = failure_of(error, reporter, attempt.prefill, attempt.decode, dead)
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
            record.add_death(failure.dead, (attempt.prefill, attempt.decode))
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


def _other_weights(generation: Generation, before: Attempt, target: Target) -> WeightsChanged | None:
    """Return why a request with tokens cannot go on there: it would have tokens of two models, which only a mixed
    change allows. None if it can."""
    old, new = before.target.decode.weights, target.decode.weights
    if old.number == new.number or not generation.num_emitted or new.goes_on_from(old):
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
