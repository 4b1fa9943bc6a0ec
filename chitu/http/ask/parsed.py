"""What parsing needs of the cluster, and what it makes of a body: prompts as token ids, each with its sampling, and
output options. Pure; pickled on its way to a process and back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest, NoInstance
from chitu.http.ask.served_model import ModelLimits
from chitu.http.messages.message_parser import MessagePlan
from chitu.net.http import Scope, header
from chitu.protocol import ImagePart, RequestOptions, SamplingParams
from chitu.router.costs import NO_SLO, SLO

_PLACE = re.compile(r"(\d+)(.*)", re.DOTALL)


class OutputOptions(msgspec.Struct):
    """Options for what the HTTP layer does with the tokens."""

    n: int
    """Choices generated for each prompt."""
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    return_proof: bool = False
    """The answer contains a proof of how it was served."""
    logprobs: int | None = None
    """Number of most likely tokens returned with each token; None: no logprobs."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens for each prompt token. By the field of that name; `echo` does not count here."""
    echo: bool = False
    num_returned: int = 0
    """Number of the `n` choices that the client gets: those with the highest logprob per token. 0: all."""
    continuous_usage: bool = False
    """Every event has the usage of its choice so far."""
    return_receipt: bool = False
    """The proof contains the receipt of the only choice."""
    special_stops: dict[str, int] = {}
    """Special tokens whose texts occur in `stops`: ids by text."""

    @property
    def stops_by_id(self) -> dict[int, str]:
        """The stops that are the text of a special token, by its id."""
        return {self.special_stops[stop]: stop for stop in self.stops if stop in self.special_stops}

    @property
    def stop_ids(self) -> list[int]:
        """Ids of the stops that are the text of a special token: D stops there."""
        return list(self.stops_by_id)


class Prompt(msgspec.Struct):
    token_ids: bytes
    """Packed little-endian int32."""
    num_tokens: int
    echo: str
    """Text of the prompt if the answer repeats it, else empty."""
    num_added: int | None = None
    """Tokens before `echo` that the tokenizer added; None if `echo` was decoded from tokens."""
    images: tuple[ImagePart, ...] = ()
    """Its images, in order of position."""


class CallSchema(NamedTuple):
    param: str
    """Name of its field."""
    why: str
    """The reason why calls follow it."""
    has_places: bool = True
    """Whether the places within it are those of its field."""


class ParsedRequest(msgspec.Struct):
    """A parsed request: prompts times n choices."""

    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """Sampling parameters, one per prompt."""
    options: OutputOptions
    timeout_s: float | None = None
    """Timeout that the client set."""
    asked: RequestOptions = RequestOptions()
    """What its instances are told beside tokens and sampling."""
    slo: SLO = NO_SLO
    prediction: bytes = b""
    """Tokens that each choice may have, packed little-endian int32."""
    plan: MessagePlan | None = None
    """How the text of a chat's choices is parsed; None: all of it is content."""
    is_chat: bool = True
    for_answer: Any = None
    """What the format of its answer needs to know of the body; of its API's own type."""
    warnings: list[str] = []
    """Warnings for the client about fields that had no effect."""
    grammar_param: str | None = None
    """Name of the field that the samplings' grammar comes from."""
    call_schemas: tuple[CallSchema, ...] = ()
    """Schemas in a grammar of calls."""
    fills_context: bool = False
    """The tokens of the answer are those that the context has room for, fewer than asked for."""
    files: dict[bytes, bytes] = {}
    """Files of its images, by `ImagePart.key`."""
    fetched: dict[str, bytes] = {}
    """Those of them that were fetched, by URL: what the next router continues the request with."""
    image_fingerprint: bytes = b""
    """`ImageForm.fingerprint` of what prepares them, if it has any: receipts and kept requests name it."""

    @property
    def is_pooled(self) -> bool:
        """Whether the answer is made of the prompts' pooled states, and nothing is generated."""
        return bool(self.samplings[0].pooling)

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error of compiling the grammar with the field that is at fault. Its `param` is that of
        `GrammarCompiler.compile`."""
        place = None if error.param is None else _PLACE.fullmatch(error.param)
        if place is None:
            return InvalidRequest(f"{self.grammar_param}: {error.message}", self.grammar_param)
        if not self.call_schemas:
            param = f"{self.grammar_param}{place[2]}"
            return InvalidRequest(f"{param}: {error.message}", param)
        schema = self.call_schemas[int(place[1])]
        param = f"{schema.param}{place[2] if schema.has_places else ''}"
        return InvalidRequest(f"{param}: {error.message} ({schema.why})", param)

    @property
    def why_not_kept(self) -> str:
        """The field because of which the request cannot outlive its router; empty if it can."""
        options = self.options
        fields = {
            "n": len(self.prompts) * options.n > 1,
            "tools": self.plan is not None and bool(self.plan.names),
            "return_proof": options.return_proof,
            "prompt_logprobs": options.prompt_logprobs is not None,
            "a route without generation": self.is_pooled,
            "echo with logprobs": options.echo and options.logprobs is not None,
        }
        return next((name for name, is_asked in fields.items() if is_asked), "")


def client_timeout_s(scope: Scope) -> float | None:
    """Return how many seconds the client waits for the whole answer: the header X-Request-Timeout. Raise InvalidRequest
    if it is not a positive decimal number."""
    given = header(scope, b"x-request-timeout")
    if given is None:
        return None
    try:
        timeout_s = math.nan if b"_" in given else float(given)  # Python parses 1_0 as ten
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        text = given[:40].decode("latin-1")
        raise InvalidRequest(f"X-Request-Timeout: {text!r} is no positive number of seconds", "X-Request-Timeout")
    return timeout_s


class ClusterFacts(msgspec.Struct, frozen=True):
    """State of the cluster at the time when a body is parsed."""

    limits: ModelLimits | None
    """Limits of the instances that serve; None if nothing serves."""
    why_unusable: str
    """Reason why nothing serves; empty if there are limits."""
    vocab_size: int
    """Vocabulary size of the instances that serve; the checkpoint's while none serves."""
    sees_images: bool = True
    """Whether all instances that serve have the model's vision, if it has one."""
    adapters: dict[str, str] | None = None
    """As `ServedModel.adapters`; None: those that the process knows."""


class ParseContext(msgspec.Struct, frozen=True):
    """Context in which a body is parsed."""

    facts: ClusterFacts
    require_client: Callable[[], None]
    """Raises if the client no longer waits for the answer."""
    fetched: Mapping[str, bytes] = {}
    """Files of images at URLs."""
    reads_images: bool = False
    """Whether this process reads files of images."""

    def require_limits(self) -> ModelLimits:
        if self.facts.limits is None:
            raise NoInstance(self.facts.why_unusable)
        return self.facts.limits


class TokensAnswer(NamedTuple):
    body: bytes
    """JSON, which can be as large as the body that it answers."""
    warnings: list[str]
