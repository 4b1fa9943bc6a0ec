"""The bodies of the generation routes, `/tokenize` and `/detokenize`: fields, ranges, defaults. Pure.

Called by the routes on the loop thread. JSON is read strictly: an escaped half of a surrogate pair, which is no text,
is an error here.

Everything that the service does not do yet is refused by name, never ignored; a field at its neutral value is taken.
Fields that nobody knows are accepted, as OpenAI does (and logged at debug level).
"""

from __future__ import annotations

import logging
import random
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec

from chitu.errors import InvalidRequest
from chitu.messages import SamplingParams

log = logging.getLogger(__name__)

MAX_N = 128
MAX_PROMPTS = 1024
"""Prompts in one body; each is a request of its own."""
MAX_STOPS = 16
MAX_DETOKENIZE = 1 << 20
"""Token ids in one body."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chat has the rest of the context."""

SEED_MASK = (1 << 63) - 1
MAX_ID_DIGITS = 20
"""Of a token id given as text."""


def _documented(**schema: Any) -> msgspec.Meta:
    """For the OpenAPI document only: a wrong type is msgspec's error, a wrong value that of the functions below."""
    return msgspec.Meta(extra_json_schema=schema)


_Count = Annotated[int, _documented(minimum=1)]
_Penalty = Annotated[float, _documented(minimum=-2, maximum=2)]
_Share = Annotated[float, _documented(minimum=0, maximum=1)]
_StopText = Annotated[str, _documented(minLength=1)]
_TokenIdText = Annotated[str, _documented(pattern="^[0-9]+$")]
_TokenId = Annotated[int, _documented(minimum=0)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What both routes share. `None` is the same as leaving a field out."""

    model: str | None = None
    # OpenAI
    max_tokens: _Count | None = None
    temperature: Annotated[float, _documented(minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, _documented(exclusiveMinimum=0, maximum=1)] | None = None
    n: Annotated[int, _documented(minimum=1, maximum=MAX_N)] | None = None
    stop: _StopText | Annotated[list[_StopText], _documented(maxItems=MAX_STOPS)] | None = None
    seed: Annotated[int, _documented(minimum=-(1 << 63), maximum=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[_TokenIdText, Annotated[float, _documented(minimum=-100, maximum=100)]] | None = None
    user: str | None = None
    # extensions (names as vLLM and SGLang have them)
    top_k: Annotated[int, _documented(minimum=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, _documented(exclusiveMinimum=0, maximum=10)] | None = None
    min_tokens: Annotated[int, _documented(minimum=0)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # not supported yet, on either route
    response_format: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    top_logprobs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    regex: Any = None
    json_schema: Any = None
    ebnf: Any = None
    use_beam_search: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string"}
_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
_PROMPTS = [_TEXT, _list_of(_TEXT), _TOKEN_IDS, _list_of(_TOKEN_IDS)]


class CompletionBody(GenerationBody, kw_only=True):
    prompt: Annotated[Any, _documented(anyOf=_PROMPTS)] = None
    """A text, a list of texts, a list of token ids or a list of those: `completion_prompts`."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct):
    type: Annotated[str, _documented(enum=["text"])]
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class ChatBody(GenerationBody, kw_only=True):
    messages: Annotated[list[ChatMessage], _documented(minItems=1)] | None = None
    max_completion_tokens: _Count | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    store: bool | None = None
    chat_template: Any = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages (the template writes them)."""


class DetokenizeBody(msgspec.Struct):
    tokens: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_DETOKENIZE)]
    model: str | None = None
    skip_special_tokens: bool = False


_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_PARAM = re.compile(r"`\$\.?([^`]*)`")

completion_decoder = msgspec.json.Decoder(CompletionBody)
chat_decoder = msgspec.json.Decoder(ChatBody)
tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def decode_body(decoder: msgspec.json.Decoder[_BodyT], raw: bytes) -> _BodyT:
    """A body as its struct. InvalidRequest with the field's name where a type is wrong or the JSON is broken."""
    try:
        body = decoder.decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PARAM.search(text)
        param = found.group(1) if found else ""
        what = text.split(" - at ")[0]
        raise InvalidRequest(f"{param or 'the body'}: {what}", param or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if log.isEnabledFor(logging.DEBUG):
        unknown = sorted(set(msgspec.json.decode(raw)) - set(body.__struct_fields__))
        if unknown:
            log.debug("fields that are not known and have no effect: %s", ", ".join(unknown))
    return body


@dataclass(slots=True)
class OutputOptions:
    """What the HTTP layer does with the tokens."""

    n: int
    stream: bool
    include_usage: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    echo: bool = False


# ------------------------------------------------------------------------------------------------------------ refusals


def _refuse(body: GenerationBody, name: str, neutral: tuple[Any, ...] = ()) -> None:
    value = getattr(body, name, None)
    if value is not None and value not in neutral:
        raise InvalidRequest(f"{name} is not supported yet; leave it out", name)


UNSUPPORTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    # name, and the values at which it is taken
    ("response_format", ({"type": "text"},)),
    ("logprobs", (False,)),
    ("prompt_logprobs", (False,)),
    ("top_logprobs", (0,)),
    ("guided_json", ()),
    ("guided_regex", ()),
    ("guided_choice", ()),
    ("guided_grammar", ()),
    ("structured_outputs", ()),
    ("regex", ()),
    ("json_schema", ()),
    ("ebnf", ()),
    ("use_beam_search", (False,)),
    ("tools", ([],)),
    ("tool_choice", ("none", "auto")),
    ("functions", ([],)),
    ("function_call", ("none", "auto")),
)
UNSUPPORTED_CHAT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("modalities", (["text"],)),
    ("audio", ()),
    ("prediction", ()),
    ("reasoning_effort", ("none",)),
    ("verbosity", ("medium",)),
    ("web_search_options", ()),
    ("store", (False,)),
    ("chat_template", ()),
    ("continue_final_message", (False,)),
    ("add_generation_prompt", (True,)),
)


_unsupported_of = attrgetter(*(name for name, _ in UNSUPPORTED), "suffix", "best_of")
_unsupported_of_chat = attrgetter(*(name for name, _ in UNSUPPORTED + UNSUPPORTED_CHAT))


def _is_plain(values: tuple[Any, ...]) -> bool:
    """None of them given: nearly every request, so it is found out with one comparison."""
    return values.count(None) == len(values)


def check_completion(body: CompletionBody) -> None:
    """Refuse what is not supported. InvalidRequest naming the field."""
    if _is_plain(_unsupported_of(body)):
        return
    for name, neutral in UNSUPPORTED:
        # 0 asks completions for the chosen token's logprob, and 0 == False.
        if getattr(body, name) is not None and not (name == "logprobs" and body.logprobs is False):
            _refuse(body, name, () if name == "logprobs" else neutral)
    _refuse(body, "suffix", ("",))
    if body.best_of is not None and body.best_of not in (1, body.n or 1):
        raise InvalidRequest("best_of above n is not supported yet; use n", "best_of")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of ({body.best_of}) must not be below n ({body.n})", "best_of")


def check_chat(body: ChatBody) -> None:
    """The same for chat."""
    if _is_plain(_unsupported_of_chat(body)):
        return
    for name, neutral in UNSUPPORTED:
        if getattr(body, name) is not None:
            _refuse(body, name, neutral)
    for name, neutral in UNSUPPORTED_CHAT:
        if getattr(body, name) is not None:
            _refuse(body, name, neutral)


# -------------------------------------------------------------------------------------------------------------- prompts


def completion_prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts of a body, all texts or all token ids. InvalidRequest for any other shape."""
    prompt: Any = body.prompt
    if prompt is None:
        raise InvalidRequest("prompt is required", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those", "prompt"
        )
    if _all_ints(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are taken", "prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return prompt
    if all(isinstance(entry, list) and entry and _all_ints(entry) for entry in prompt):
        return prompt
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)",
        "prompt",
    )


def _all_ints(values: list[Any]) -> bool:
    return set(map(type, values)) == {int}


def chat_messages(given: list[ChatMessage] | None) -> list[dict[str, str]]:
    """Messages as the chat template takes them. InvalidRequest for what is not text."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(message, name):
                raise InvalidRequest(f"{where}.{name} is not supported yet", f"{where}.{name}")
        content = message.content
        if content is None:
            raise InvalidRequest(f"{where}.content is required", f"{where}.content")
        if not isinstance(content, str):
            for j, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    raise InvalidRequest(
                        f"{where}.content[{j}]: only parts of type 'text' are supported, not {part.type!r}",
                        f"{where}.content[{j}]",
                    )
            content = "".join(part.text or "" for part in content)
        messages.append({"role": message.role, "content": content})
    return messages


# ------------------------------------------------------------------------------------------------------------- sampling


def _ranged(value: float | None, default: float, low: float, high: float, name: str, open_low: bool = False) -> float:
    if value is None:
        return default
    if not (low < value <= high if open_low else low <= value <= high):
        bounds = f"{'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value:g}", name)
    return value


def _token_ids(values: list[int] | None, vocab_size: int, name: str) -> tuple[int, ...]:
    if not values:
        return ()
    for token in values:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name}: {token} is no token id (0 to {vocab_size - 1})", name)
    return tuple(values)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        # The length first: Python reads no integer of thousands of digits.
        if not (len(key) < MAX_ID_DIGITS and key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:MAX_ID_DIGITS]!r} is no token id (0 to {vocab_size - 1})", "logit_bias"
            )
        result[int(key)] = _ranged(value, 0.0, -100, 100, "logit_bias")
    return result


def output_options(body: GenerationBody) -> OutputOptions:
    """InvalidRequest where `n`, `stop` or `stream_options` are out of range."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"n must be from 1 to {MAX_N}, not {n}", "n")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise InvalidRequest("stream_options is allowed only with stream: true", "stream_options")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are taken", "stop")
    if "" in stops:
        raise InvalidRequest("stop must not hold an empty string", "stop")
    return OutputOptions(
        n=n,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        return_token_ids=bool(body.return_token_ids),
        echo=isinstance(body, CompletionBody) and bool(body.echo),
    )


def sampling_params(body: GenerationBody, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Every default resolved, every range checked. `max_tokens` was capped by the context already."""
    min_tokens = body.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(f"min_tokens must be from 0 to max_tokens ({max_tokens}), not {min_tokens}", "min_tokens")
    top_k = body.top_k or 0
    if top_k < -1:
        raise InvalidRequest(f"top_k must be at least 1, or 0 or -1 for off, not {top_k}", "top_k")
    seed = body.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise InvalidRequest("seed must fit in 64 bits", "seed")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_ranged(body.temperature, 1.0, 0, 2, "temperature"),
        top_k=min(max(top_k, 0), vocab_size),
        top_p=_ranged(body.top_p, 1.0, 0, 1, "top_p", open_low=True),
        min_p=_ranged(body.min_p, 0.0, 0, 1, "min_p"),
        seed=random.getrandbits(63) if seed is None else seed & SEED_MASK,
        presence_penalty=_ranged(body.presence_penalty, 0.0, -2, 2, "presence_penalty"),
        frequency_penalty=_ranged(body.frequency_penalty, 0.0, -2, 2, "frequency_penalty"),
        repetition_penalty=_ranged(body.repetition_penalty, 1.0, 0, 10, "repetition_penalty", open_low=True),
        logit_bias=_logit_bias(body.logit_bias, vocab_size) if body.logit_bias else {},
        stop_token_ids=_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
    )


def wanted_tokens(body: GenerationBody) -> int | None:
    """`max_tokens` (chat: `max_completion_tokens` first) as the client gave it. InvalidRequest below 1."""
    name, value = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, value = "max_completion_tokens", body.max_completion_tokens
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1, not {value}", name)
    return value


def with_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice `index` of n: seed + index."""
    if index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & SEED_MASK)
