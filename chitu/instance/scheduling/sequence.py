"""One request on one instance, in the step thread."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from chitu.grammars import CompiledGrammar
from chitu.kv_cache.page_keys import PageKeys
from chitu.kv_cache.tiers.page_load import PageLoad
from chitu.protocol import NO_TIMES, PrefillTimes, SamplingParams, StageTimes, TransferSums
from chitu.protocol.sequence_states import SequenceState


def queue_order(arrival_s: float, number: int, priority: int, most_s: float) -> tuple[float, int]:
    """Return the place of a request in every queue of an instance, and in the order in which running requests give way:
    the time of its arrival, moved by its priority. The `number` of its arrival decides between equal times.

    A priority below 0 moves it ahead, one above 0 back, by less than `most_s`: by half of that for 1, two thirds for 2.
    So urgent requests overtake only what came shortly before them, and a request ages: after twice `most_s` nothing
    that arrives overtakes it any more, whatever the priorities. A place never changes, so no two requests can retract
    each other in turn.
    """
    return arrival_s + most_s * priority / (1 + abs(priority)), number


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on one instance, compared by identity. The sequence with the lowest `order` (see `queue_order`) comes
    first everywhere, and gives way last."""

    room: bytes
    request_id: str
    order: tuple[float, int]
    arrival_s: float
    prompt: bytes
    """Tokens to prefill, int32 LE: the client's prompt, then `num_continued` tokens of output."""
    sampling: SamplingParams | None = None
    num_continued: int = 0
    """Output tokens that another D emitted before it was lost; this one continues as if it had emitted them."""
    router_worker: int = 0
    """Incarnation of the router's API process that sent the request; 0: the router is one process."""
    prefill_rank: int = -1
    prefill_incarnation: int = 0
    state: SequenceState = SequenceState.WAITING
    announced: bool = False
    """P: D has reserved its pages, so what is computed can be delivered."""
    slot: int = -1
    admitted: bool = False
    """Whether the executor knows the sequence's slot, from this step's plan on at the latest."""
    aux_slot: int = -1
    kv_len: int = 0
    """Tokens whose KV is in the pages once the launched steps are done."""
    cached_tokens: int = 0
    """Prompt tokens that are not computed because cached pages hold them. Known once the prefill is admitted, on D when
    the logits arrive."""
    known_tokens: int = 0
    """Prompt tokens that are expected to need no computing here, as they are cached in the pool or in host memory. An
    estimate for load reports, until the prompt computes."""
    capacity_tokens: int = 0
    """Tokens for which the held pages have room."""
    emitted: array[int] = field(default_factory=lambda: array("i"))
    launched: int = 0
    """Tokens that launched steps sample: those emitted, and the one that may be in flight."""
    max_new_tokens: int = field(init=False)
    """Most tokens to sample here; 0 on P."""
    prompt_logprobs: int | None = None
    """`SamplingParams.prompt_logprobs` of the request. P and unified instances compute them, D passes them on."""
    prompt_lines: bytes | None = None
    """Packed logprobs of the prompt, as far as they are known; None if none are, or none were requested."""
    stop_ids: frozenset[int] = frozenset()
    grammar: CompiledGrammar | None = None
    """Grammar that the tokens must follow, kept here so that the executor finds it at every admission."""
    keys: PageKeys | None = None
    """Keys of the sequence's pages in the prefix cache; None if it takes none from there and adds none."""
    load: PageLoad | None = None
    """Load of prompt pages from the tiers. Until it ends, the sequence computes nothing and the executor does not know
    it."""
    offload_key: int = -1
    kv_bytes: int = 0
    """Bytes that P moved for this request; 0 until the KV is here."""
    transfer_sums: TransferSums | None = None
    """Checksums of the pages that P wrote, on both sides, if the request asks for them and its KV is here."""
    prefill_times: PrefillTimes = NO_TIMES
    computing_since_s: float = 0.0
    """When the first prefill chunk began. This and the next three are on the instance's clock, 0 until then."""
    announced_s: float = 0.0
    kv_landed_s: float = 0.0
    first_token_s: float = 0.0
    forks: list[Sequence] = field(default_factory=list)
    """Forks that begin with this prompt; a fork that has begun leaves the list. While it is not empty, this is only a
    prompt, of which nothing is sampled."""
    source: Sequence | None = None
    """Prompt that this sequence is, or was, a fork of."""

    def __post_init__(self) -> None:
        self.max_new_tokens = 0 if self.sampling is None else self.sampling.max_tokens - self.num_continued

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // 4

    @property
    def client_prompt_len(self) -> int:
        """Number of tokens in the client's prompt; the rest of `prompt` counts as output."""
        return self.prompt_len - self.num_continued

    @property
    def needs_kv(self) -> bool:
        """Whether D needs the KV. A request for one token samples it from P's logits row and computes nothing here."""
        return self.max_new_tokens > 1

    @property
    def final_len(self) -> int:
        """Most prompt and output tokens at the end. On P, and for a prompt with forks, the prefilled tokens."""
        if self.sampling is None or self.forks:
            return self.prompt_len
        return self.client_prompt_len + self.sampling.max_tokens

    @property
    def choices(self) -> list[Sequence]:
        """Sequences that the router sees in place of this one: its forks, or itself."""
        return list(self.forks) or [self]

    @property
    def remaining_prompt(self) -> int:
        return self.prompt_len - self.kv_len

    @property
    def tokens_to_compute(self) -> int:
        """Prompt tokens still to compute, by what is known of the caches."""
        return self.prompt_len - max(self.kv_len, self.known_tokens)

    def stop_load(self) -> None:
        """Stop a load from the tiers, so that its pages can be given to another sequence."""
        if self.load is not None:
            self.load.stop()
            self.load = None

    def token_ids(self) -> bytes:
        """Return prompt and output so far, int32 LE."""
        return self.prompt + self.emitted.tobytes()

    def stage_times(self, now_s: float) -> StageTimes:
        """Return the times to report to the router when the request ends on D or a unified instance at `now_s`."""
        first, announced, landed = (
            max(0.0, moment_s - self.arrival_s) for moment_s in (self.first_token_s, self.announced_s, self.kv_landed_s)
        )
        return StageTimes(self.prefill_times, announced, first, landed, now_s - self.arrival_s)

    def finish_reason(self, token: int) -> str:
        """Return why the request ends with `token`, its newest; empty if it continues."""
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.emitted) >= self.max_new_tokens else ""
