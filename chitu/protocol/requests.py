"""Requests and their tokens: router -> P, D (request ports), D -> router (token port)."""

from __future__ import annotations

from typing import Literal, Union

from chitu.protocol.account import StageTimes
from chitu.protocol.grammars import Grammar
from chitu.protocol.images import ImagePart
from chitu.protocol.wire import Codec, Wire

MAX_LOGIT_BIAS = 1024
"""Most entries of `logit_bias`. Their cost on an instance, and that of the stop ids, is counted in its memory
budget."""
MAX_STOP_TOKEN_IDS = 1024

MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
"""Maximum number of token sequences. Each word of a client needs two: with and without a leading space."""
MAX_BAD_WORD_TOKENS = 16
MAX_POOLED_IDS = 16
MAX_SAMPLING_ENTRIES = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "pooled_ids": MAX_POOLED_IDS,
}
"""The same by field of `SamplingParams`: an instance checks each collection there against it."""
Pooled = Literal["", "last", "mean", "logits"]
"""The hidden state of the prompt's last token (`last`); the sums of those of all tokens, one for each chunk (`mean`);
the last token's logits of chosen ids (`logits`). Vectors of float32 LE, one after the other."""
MAX_PRIORITY = (1 << 31) - 1
"""Largest priority; the smallest is its negative. The lowest goes first; 0 is the default."""
MAX_FORKS = 128
"""Most choices of one prompt that one message asks for."""

TraceLevel = Literal["", "records", "frames"]
"""What is traced of a request: nothing, trace records (`protocol/trace.py`), or these with the frames of its
messages."""


class PromptOutput(Wire, frozen=True):
    """What comes of a prompt beside its KV and its last row of logits."""

    logprobs: int | None = None
    """As `SamplingParams.prompt_logprobs`."""
    pooling: Pooled = ""
    """As in SamplingParams; it travels in the place of prompt logprobs."""
    pooled_ids: tuple[int, ...] = ()
    """At most MAX_POOLED_IDS."""


class SamplingParams(Wire, frozen=True):
    """How tokens are chosen, as D (or a unified instance) needs it. The router has resolved every default.

    Stop *strings* are not here: the router scans the text, since only the router detokenises.
    """

    max_tokens: int
    """Most tokens to emit; at least 1; already capped by the context length."""
    min_tokens: int = 0
    """Until this many tokens were emitted, eos and stop ids are masked out."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Resolved by the router (random if the client gave none): token n depends only on (seed, n) and the logits."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both count emitted tokens only (OpenAI)."""
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and emitted tokens (transformers)."""
    logit_bias: dict[int, float] = {}
    """At most MAX_LOGIT_BIAS."""
    stop_token_ids: tuple[int, ...] = ()
    """At most MAX_STOP_TOKEN_IDS."""
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are drawn; empty: any. At most MAX_ALLOWED_TOKEN_IDS."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The last token of each is not drawn after the others of it, which must all have been emitted. At most
    MAX_BAD_WORDS of at most MAX_BAD_WORD_TOKENS."""
    logprobs: int | None = None
    """Number of most likely tokens (at most MAX_LOGPROBS) that come with each token's own logprob. None: no
    logprobs."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens that come with each prompt token except the first; not if output of another D
    follows the prompt."""
    pooling: Pooled = ""
    """What comes, in the place of prompt logprobs, of the prompt's hidden states behind the final norm."""
    pooled_ids: tuple[int, ...] = ()
    """Ids of `logits`. At most MAX_POOLED_IDS."""
    grammar: Grammar | None = None
    """Grammar of the emitted tokens, those of another D included."""
    page_sums: bool = False
    """Whether `Finish` brings checksums of its pages, both those that it leaves and those that were moved."""

    @property
    def prompt_output(self) -> PromptOutput:
        """The part of it that concerns whoever computes the prompt."""
        return PromptOutput(self.prompt_logprobs, self.pooling, self.pooled_ids)


# ------------------------------------------------------------------------------------------------- router -> scheduler


class RequestOptions(Wire, frozen=True):
    """What a request asks of its instances beside its tokens. The router passes it on as it is: a new option is a field
    here, and is named only where a body is parsed and where an instance acts on it."""

    cache_salt: str | None = ""
    """Prompts share cached pages only if their salts are equal. None: this request uses no cached page, and leaves
    none."""
    priority: int = 0
    """The lowest value goes first, wherever requests wait on P and D, within limits (`queue_order`); equal ones go in
    order of arrival."""
    trace: TraceLevel = ""
    """Whether its instances record their work on it."""
    adapter: str = ""
    """Name of the LoRA adapter that computes with the model; empty: the model alone."""
    is_drafted: bool = True
    """Whether tokens may be drafted ahead, where the instance does so. Its tokens are the same in any case."""
    adapter_hash: str = ""
    """Hash of the adapter that the request began with, or is to begin with: an instance where that name has another
    content refuses it. Empty: whatever has the name."""


class RequestHead(Wire, frozen=True):
    """What all instances of an attempt are told of its request."""

    room: bytes
    request_id: str
    """A label for logs; never a key."""
    token_ids: bytes
    """Prompt, int32 LE. P computes it; D needs its length for pages and its tokens for penalties."""
    num_emitted: int = 0
    """Number of last tokens of `token_ids` that another D emitted before it was lost. This D continues after them as if
    it had emitted them itself (penalties, seed position, `max_tokens`, `min_tokens`)."""
    router: int = 0
    """Index of the router that asks, in `router.hosts`: its tokens go there, and it ends with that router."""
    weights: int = 0
    """`Weights.number` of the instances when they were chosen: one that has others by now refuses."""
    options: RequestOptions = RequestOptions()
    images: tuple[ImagePart, ...] = ()
    """Images of the prompt, in order of position."""
    encoders: tuple[int, ...] = ()
    """For each image the engine rank of the E that is to encode it, if its features are needed and not here;
    `ANY_ENCODER` or `NO_ENCODER` in the place of a rank. Empty: `ANY_ENCODER` for all."""


class LinkStamp(Wire, frozen=True, array_like=True):
    """Place of a message on its link (`net/link.py`)."""

    link: int = 0
    """Id of the link: random, drawn by a process of the router whenever the instance joins."""
    number: int = 0
    """Number of the message, from 1. 0: not numbered."""
    num_kept: int = 0
    """How many messages before this one the sender can send again; older ones were acknowledged or given up."""


class PrefillRequest(Wire, frozen=True, tag="prefill_request"):
    """P's half: run the prompt, send KV and the first logits row to the D that announces the room."""

    head: RequestHead
    decode_rank: int
    decode_incarnation: int
    output: PromptOutput = PromptOutput()
    """It travels with Success; none if output of another D follows the prompt."""
    stamp: LinkStamp = LinkStamp()
    early: SamplingParams | None = None
    """By which P draws the first token, too, as D will from the same row, and sends it at once (`TokenBatch.early`).
    None: only D draws."""


class Fork(Wire, frozen=True, array_like=True):
    """One of several choices of a prompt that is computed once and moved once."""

    room: bytes
    """Room of the choice: its tokens, its end and its cancellation carry it."""
    request_id: str
    seed: int
    """Replaces the one in `sampling`; all else is the same."""


class SampledRequest(Wire, frozen=True):
    """What D and a unified instance are told: how to go on behind the prompt."""

    head: RequestHead
    sampling: SamplingParams
    forks: tuple[Fork, ...] = ()
    """If not empty, the head's room is the prompt's alone, and each of these choices begins with it. At most
    MAX_FORKS."""
    token_group: int = 1
    """Most tokens that may wait for each other, because nobody reads them one by one. The first token, the last ones
    and those before an error never wait."""
    stamp: LinkStamp = LinkStamp()
    prediction: bytes = b""
    """Tokens that the answer may have, int32 LE: drafts are taken from there first."""


class DecodeRequest(SampledRequest, frozen=True, kw_only=True, tag="decode_request"):
    """D's half: reserve, announce to the named P, sample and stream."""

    prefill_rank: int
    prefill_incarnation: int


class UnifiedRequest(SampledRequest, frozen=True, tag="unified_request"):
    """Both halves on one instance."""


class CancelRequest(Wire, frozen=True, tag="cancel_request"):
    """The client is gone, or a stop string was found. Idempotent; an unknown room is ignored."""

    room: bytes
    stamp: LinkStamp = LinkStamp()


class LinkAck(Wire, frozen=True, tag="link_ack"):
    """Acknowledgement of the receiving end of a link. An instance sends it in its heartbeats, the router in its answers
    to them, and each at once if a gap opens. Not numbered."""

    link: int
    last: int
    """Number up to which everything was received."""
    has_gap: bool = False
    """Whether something came after a missing message: everything after `last` is to be sent again."""


RequestMessage = Union[PrefillRequest, SampledRequest]
SchedulerMessage = Union[PrefillRequest, DecodeRequest, UnifiedRequest, CancelRequest]
RequestPortMessage = Union[SchedulerMessage, LinkAck]

# ------------------------------------------------------------------------------------------------- scheduler -> router


class TransferSums(Wire, frozen=True, array_like=True):
    """Checksums of the pages that P wrote for a request: as P meant them, and as they arrived. They are `[layers,
    pages]`, int64 LE."""

    first_page: int
    """Number of the first of these pages, counted over the prompt; earlier ones were cached on D."""
    layers: int
    """Layers that have checksums of their own; 1 if each covers all layers, for a very long prompt."""
    sent: bytes
    """From P's memory, when it wrote them."""
    landed: bytes
    """From D's memory, before D computed anything in these pages. Equal to `sent` if nothing was damaged."""


class Finish(Wire, frozen=True, array_like=True):
    """End of a room, in the token stream so that it can never overtake a token."""

    room: bytes
    reason: str
    """`stop` (eos or stop id), `length`, `cancelled` or `error`."""
    code: str = ""
    """With `error`: a code of `chitu.errors`."""
    message: str = ""
    kv_bytes: int = 0
    """KV and logits bytes that P moved for this room; 0 on a unified instance."""
    stages: StageTimes = StageTimes()
    page_sums: bytes = b""
    """Checksums, int64 LE `[layers, pages]`, of the leading full pages that the request leaves, if it asked for them.
    Pages too many to sum up are left out."""
    transfer_sums: TransferSums | None = None
    """Checksums of the pages that P wrote, on both sides, if it asked for them. None if P wrote none, or if the layout
    allows none."""
    drafts: tuple[tuple[str, int, int], ...] = ()
    """By source: tokens that were drafted here, and how many of them were right."""


class TokenBatch(Wire, frozen=True, tag="token_batch", array_like=True):
    """One message per step for all requests (token port). Columns: `tokens[i]` belongs to `rooms[i]`. A step that only
    has tokens that may wait sends none."""

    incarnation: int
    rooms: list[bytes]
    tokens: list[int]
    finished: list[Finish]
    number: int = 0
    """Number of this message on its link to this port, from 1. 0: not numbered."""
    link: int = 0
    """Link of the requests that are answered; a router drops messages with the link of another."""
    num_kept: int = 0
    """As in PrefillRequest."""
    logprobs: list[tuple[int, bytes]] = []
    """Index in `tokens`, ascending, and packed logprobs of each token whose request asks for them
    (`protocol/logprobs.py`)."""
    cached: list[tuple[bytes, int]] = []
    """Rooms whose first token is in this message, with the prompt tokens that were in cached pages and so were not
    computed. A room without any is left out."""
    prompt_logprobs: list[tuple[bytes, bytes]] = []
    """Logprobs of prompts whose first token is in this message: one line after the other, without the prompt's first
    token. Sent once for all forks of a prompt, by the prompt's room, with the first token of any of them."""
    weights: str = ""
    """Hash of the model, if it is another one from the tokens of this message on (a mixed change of weights)."""
    groups: list[tuple[bytes, list[int]]] = []
    """Rooms of requests with a `token_group`, and the newest tokens of each."""
    early: list[tuple[bytes, int]] = []
    """From P: rooms and the first token of each, which P drew from the row of logits that it sends to D. D's own first
    token confirms it."""


scheduler_codec: Codec[RequestPortMessage] = Codec(RequestPortMessage)
token_codec: Codec[TokenBatch] = Codec(TokenBatch)
