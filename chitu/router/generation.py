"""A request on the router while its output comes in: what was asked, its attempts on pairs, what its reader has taken.

Written by `PDRequestRouter`, read by the HTTP layer after each `wake`; loop thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from chitu.errors import ChituError
from chitu.protocol import Finish, Fork, SamplingParams, TraceLevel
from chitu.protocol.generation_states import GenerationState
from chitu.protocol.snapshot import RequestSnapshot, RequestState
from chitu.router.retry import FailureHistory
from chitu.router.routing import InstanceKey, Target
from chitu.types import room_text


class GenerateRequest(msgspec.Struct):
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
    """Whether P and D record what they do for it."""


class PromptGroup(msgspec.Struct, eq=False):
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


class Attempt(msgspec.Struct, eq=False):
    """One attempt of a generation on one pair."""

    room: bytes
    target: Target
    generation: Generation
    prefill: InstanceKey | None
    """None on a unified instance."""
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

    def note_cached(self, num_tokens: int) -> None:
        """Set the number of cached tokens, which the instance reports with the first token."""
        self.cached_tokens = max(0, min(num_tokens, self.num_tokens))

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
            # All zeros if the last token came, but D's report of the end did not.
            stages=finish.stages if finish is not None and finish.stages.total_s else None,
            error=self.error.code if self.error is not None else "",
            attempt=self.number,
            continued_tokens=self.num_continued,
            cached_tokens=self.cached_tokens,
            prompt_room=room_text(self.group.room) if self.group is not None else msgspec.UNSET,
            tenant=generation.request.tenant or msgspec.UNSET,
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
    noted: bool = False
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

    def end_reason(self) -> str:
        """Return why the newest token is the last one, as D would report it; empty if more are to come."""
        output = self.output
        if output and output[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(output) >= self.request.sampling.max_tokens else ""
