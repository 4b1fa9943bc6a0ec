"""A request on the router: its states, and the records of its attempts and of its output.

Only `GenerationMachine` (`request.py`) writes a state, by `GENERATION_TRANSITIONS` (docs/protocol.md shows it). The
HTTP layer reads a `Generation` after each `wake`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final

from msgspec import UNSET, Struct

from chitu.errors import (
    ChituError,
    ModelNotFound,
    WeightsChanged,
)
from chitu.protocol import Finish, Fork, ImagePart, InstanceInfo, RequestOptions, SamplingParams
from chitu.protocol.account import DraftCounts, RequestSnapshot, RequestState, Stages, attempt_stages
from chitu.router.candidates import NO_GROUPS, Groups, InstanceKey, Way
from chitu.router.costs import NO_SLO, SLO
from chitu.router.retry import FailureHistory
from chitu.types import room_text


class GenerationState(Enum):
    """State of a request, over all of its attempts: tries on one pair (or unified instance) each."""

    __hash__ = object.__hash__  # Enum's own is a Python function

    ASKED = auto()
    """It was not sent to any instance yet."""
    PREFILL = auto()
    """An attempt was dispatched, and has no token yet."""
    EARLY = auto()
    """P has sent the attempt's first token, and D, which draws it again, has not yet."""
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
    EARLY_TOKEN = auto()
    """The present attempt received its first token from P."""
    FIRST_TOKEN = auto()
    """The present attempt received its first token from D."""
    PREFILL_DIED = auto()
    """P's process ended."""
    FAIL = auto()
    """The present attempt failed."""
    STALL = auto()
    """The attempt has no token of D and none can come: a half did not reach its instance."""
    PREFILL_LOST = auto()
    """P left, was silent for too long or died. An attempt without a token of D moves if there is another pair, else it
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
RUNNING: Final = (_S.PREFILL, _S.EARLY, _S.DECODE, _S.DECODE_ALONE)
"""States in which an attempt runs."""
UNCONFIRMED: Final = (_S.PREFILL, _S.EARLY)
"""Those in which D has sent no token."""
GENERATION_TRANSITIONS: Final[Mapping[tuple[GenerationState, GenerationEvent], GenerationState]] = {
    (_S.ASKED, _E.CHOSEN): _S.PREFILL,
    (_S.PREFILL, _E.EARLY_TOKEN): _S.EARLY,
    **{(state, _E.FIRST_TOKEN): _S.DECODE for state in UNCONFIRMED},
    (_S.DECODE, _E.PREFILL_DIED): _S.DECODE_ALONE,
    **{(state, _E.STALL): _S.RETRYING for state in UNCONFIRMED},
    **{(state, _E.PREFILL_LOST): state for state in UNCONFIRMED},
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
    GenerationState.EARLY: "the first token of {peer} again, from its D",
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
    options: RequestOptions = RequestOptions()
    """What its instances are told of it beside its tokens and the sampling."""
    prediction: bytes = b""
    """Tokens that the answer may have, int32 LE."""
    images: tuple[ImagePart, ...] = ()
    """Images of the prompt, in order of position."""
    files: dict[bytes, bytes] = {}
    """Their files by key, which P may ask for until the first token."""
    tenant: str = ""
    """Tenant that may see the request; empty if the router has no API keys, or if no client asked."""
    slo: SLO = NO_SLO
    """The client's own targets for its tokens."""

    @property
    def prefix_salt(self) -> str | None:
        """What its prompt shares with others whose cached pages it may use; None if it uses none."""
        salt, adapter = self.options.cache_salt, self.options.adapter
        return f"{adapter}\0{salt}" if adapter and salt is not None else salt


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
    way: Way
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
    groups: Groups = NO_GROUPS
    """Groups that P and D are in."""
    first_token: int | None = None
    """Its first token, as P or D has sent it, whichever came first: the other's must be the same."""
    first_token_s: float | None = None
    is_early: bool = False
    """Whether P's came first."""
    cached_tokens: int = 0
    """Prefilled tokens that were in cached pages and needed no computing; known with the first token."""
    drafts: DraftCounts = ()
    """What D drafted, known with its report of the end."""
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
        prefill, decode = self.way.prefill, self.way.decode
        name = decode.name
        return name if prefill is None else f"{prefill.name}-{name}"

    def _stages(self, ended_s: float) -> Stages:
        finish = self.generation.finish
        # All zeros if the last token came, but D's report of the end did not.
        report = finish.stages if finish is not None and finish.stages.total_s else None
        return attempt_stages(
            self.created_s,
            self.first_token_s,
            ended_s,
            report,
            is_pair=self.prefill is not None,
            is_early=self.is_early,
        )

    def snapshot(self, state: RequestState | None = None, ended_s: float | None = None) -> RequestSnapshot:
        """Return its record. `state` is None while it runs."""
        generation = self.generation
        prefill, decode, finish = self.way.prefill, self.way.decode, generation.finish
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
            drafts=self.drafts or UNSET,
            tenant=generation.request.tenant or UNSET,
            revision=decode.revision or UNSET,
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
    num_taken: int = 0
    taken: array[int] = field(default_factory=partial(array, "i"))
    """Tokens that the reader has taken: another D may have to continue after them."""
    cached_tokens: int = 0
    """Prompt tokens that the newest attempt with a token did not have to compute."""
    weights: list[tuple[int, str]] = field(default_factory=list)
    """Hashes of the models that its tokens are of, each with the index of its first token: one, unless weights changed
    under it (a mixed change)."""
    adapter_hash: str = ""
    """Hash of the LoRA adapter that its tokens are of; empty without one."""
    drafts: DraftCounts = ()
    """What was drafted in all of its attempts, as far as D reported their ends."""
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
    def counts_prediction(self) -> bool:
        """Whether it has a prediction, and is known how much of it was right."""
        return bool(self.request.prediction) and self.finish is not None

    @property
    def num_attempts(self) -> int:
        """Number of attempts, the present one included."""
        return len(self.ended) + (self.attempt is not None)

    @property
    def revision(self) -> str:
        """Revision of the instances of its last attempt; empty if they have none."""
        return next((one.revision for one in reversed(self.attempts()) if one.revision), "")

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

    def why_other_adapter(self, instance: InstanceInfo) -> ChituError | None:
        """Return why the request cannot begin, or go on, with this instance: its LoRA adapter serves no more, or has
        another content than its tokens are of. None if it can."""
        name = self.request.options.adapter
        if not name:
            return None
        found, wanted = instance.adapter_hash(name), self.adapter_hash or self.request.options.adapter_hash
        if self.num_emitted and wanted and found != wanted:
            now = f"has the hash {found} by now" if found else "serves no more"
            return WeightsChanged(
                f"{self.num_emitted} tokens were computed with the LoRA adapter {name!r} of the hash {wanted}, "
                f"and it {now}"
            )
        return None if found else ModelNotFound(f"the model {name!r} does not exist any more")

    def end_reason(self) -> str:
        """Return why the newest token is the last one, as D would report it; empty if more are to come."""
        output = self.output
        if output and output[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(output) >= self.request.sampling.max_tokens else ""
