"""One request on one instance, as the step thread sees it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from chitu.grammars import CompiledGrammar
from chitu.kv_cache.page_keys import PageKeys
from chitu.kv_cache.tiers.page_load import PageLoad
from chitu.protocol import NO_TIMES, PrefillTimes, SamplingParams, StageTimes
from chitu.protocol.sequence_states import SequenceState


@dataclass(slots=True, eq=False)
class Sequence:
    """Identity is the object; `order` is by the client's priority, then by arrival on this instance: whoever has the
    lowest is first everywhere, and gives way last."""

    room: bytes
    request_id: str
    order: int
    arrival_s: float
    prompt: bytes
    """What is prefilled, int32 LE: the client's prompt, and behind it `num_continued` tokens of output."""
    sampling: SamplingParams | None = None
    num_continued: int = 0
    """Output that another D emitted before it was lost; this one goes on as if it had emitted them itself."""
    router_worker: int = 0
    """Incarnation of the router's API process that sent it; 0: the router is one process."""
    prefill_rank: int = -1
    prefill_incarnation: int = 0
    state: SequenceState = SequenceState.WAITING
    announced: bool = False
    """P: D has reserved its pages, so what is computed can be delivered."""
    slot: int = -1
    admitted: bool = False
    """The executor has been (or is, with the plan in the making) told of the slot."""
    aux_slot: int = -1
    kv_len: int = 0
    """Tokens whose KV is in the pages once the launched steps are done."""
    cached_tokens: int = 0
    """Of the prompt, that were in cached pages and are not computed; known once its prefill is admitted, on D with the
    logits."""
    capacity_tokens: int = 0
    """Tokens that the pages it holds have room for."""
    emitted: array[int] = field(default_factory=lambda: array("i"))
    launched: int = 0
    """Tokens that launched steps sample: those emitted, and the one that may be in flight."""
    max_new_tokens: int = field(init=False)
    """As many may be sampled here; 0 on P."""
    prompt_logprobs: int | None = None
    """Of the prompt, as SamplingParams has it; P and unified instances compute them, D hands them on."""
    prompt_lines: bytes | None = None
    """These, as far as they are known; None where nothing is or was asked for."""
    stop_ids: frozenset[int] = frozenset()
    grammar: CompiledGrammar | None = None
    """What its tokens must follow, held so that the executor finds it whenever it admits this."""
    keys: PageKeys | None = None
    """Of its pages in the prefix cache; None where it takes and leaves none."""
    load: PageLoad | None = None
    """Pages of its prompt that come from the tiers. Until that is over it computes nothing, and the executor has not
    been told of it."""
    offload_key: int = -1
    kv_bytes: int = 0
    """Moved for it by P; 0 until the KV is here."""
    prefill_times: PrefillTimes = NO_TIMES
    computing_since_s: float = 0.0
    """Prefill: when its first chunk began. As the next three on the instance's clock, 0 until it happens."""
    announced_s: float = 0.0
    kv_landed_s: float = 0.0
    first_token_s: float = 0.0
    forks: list[Sequence] = field(default_factory=list)
    """Not empty: this is only a prompt, of which nothing is sampled. These begin with it; those that have begun are not
    in the list any more."""
    source: Sequence | None = None
    """The prompt that this one is, or was, a fork of."""

    def __post_init__(self) -> None:
        self.max_new_tokens = 0 if self.sampling is None else self.sampling.max_tokens - self.num_continued

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // 4

    @property
    def client_prompt_len(self) -> int:
        """Tokens of the client's prompt: what lies behind them counts as output."""
        return self.prompt_len - self.num_continued

    @property
    def needs_kv(self) -> bool:
        """D: a token is computed here. Of a request for one token that is in the logits row that P hands over."""
        return self.max_new_tokens > 1

    @property
    def final_len(self) -> int:
        """Prompt and output tokens in the end, at most. On P, and of a prompt with forks, what is prefilled."""
        if self.sampling is None or self.forks:
            return self.prompt_len
        return self.client_prompt_len + self.sampling.max_tokens

    @property
    def choices(self) -> list[Sequence]:
        """What the router knows of it: its forks, or itself."""
        return list(self.forks) or [self]

    @property
    def remaining_prompt(self) -> int:
        return self.prompt_len - self.kv_len

    def stop_load(self) -> None:
        """Its pages go to others."""
        if self.load is not None:
            self.load.stop()
            self.load = None

    def token_ids(self) -> bytes:
        """Prompt and output so far, int32 LE."""
        return self.prompt + self.emitted.tobytes()

    def stage_times(self, now_s: float) -> StageTimes:
        """As the router hears them when the request ends on D (or a unified instance) at `now_s`."""
        first, announced, landed = (
            max(0.0, moment_s - self.arrival_s) for moment_s in (self.first_token_s, self.announced_s, self.kv_landed_s)
        )
        return StageTimes(self.prefill_times, announced, first, landed, now_s - self.arrival_s)

    def finish_reason(self, token: int) -> str:
        """Why the request ends with `token`, its newest; empty where it goes on."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.emitted) >= self.max_new_tokens else ""
