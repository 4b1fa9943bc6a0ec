"""The bodies of the generation routes, `/tokenize` and `/detokenize` as they come: their fields and types. Pure.

Decoded by the routes, on the loop or in a thread; read by `request_checks.py`, `sampling_fields.py` and the OpenAPI
document. JSON is read strictly: an escaped half of a surrogate pair, which is no text, is an error here. Fields that
nobody knows are accepted, as OpenAI does (and logged at debug level).
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, TypeVar

import msgspec

from chitu.errors import InvalidRequest
from chitu.protocol import MAX_LOGIT_BIAS, MAX_LOGPROBS

log = logging.getLogger(__name__)

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
"""Of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""A client's; eos may be among those that an instance gets."""
MAX_SALT_CHARS = 256
"""Of `cache_salt`."""
MAX_MESSAGES = 2048
MAX_PARTS = 1024
"""Of one message's content."""
MAX_ROLE_CHARS = 64
MAX_PROMPTS = 1024
"""Prompts in one body, and choices: each is a request of its own."""
MAX_TOKENS = 1 << 18
"""Token ids that `/detokenize` takes; what `/tokenize` gives, unless requests may have more."""
LARGE_BODY_BYTES = 16 << 10
"""Beyond it a body is looked over before anything is made of it, and is worked on in a thread (`body_threads.py`)."""
MAX_FIELD_BYTES = 64 << 10
"""In a large body, the JSON of every field that holds neither text nor tokens."""


def _documented(**schema: Any) -> msgspec.Meta:
    """For the OpenAPI document only: a wrong type is msgspec's error, a wrong value that of the functions below."""
    return msgspec.Meta(extra_json_schema=schema)


_Count = Annotated[int, _documented(minimum=1)]
_Penalty = Annotated[float, _documented(minimum=-2, maximum=2)]
_Share = Annotated[float, _documented(minimum=0, maximum=1)]
_StopText = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS, extra_json_schema={"minLength": 1})]
_TokenIdText = Annotated[str, _documented(pattern="^[0-9]+$")]
_TokenId = Annotated[int, _documented(minimum=0)]
_Bias = Annotated[float, _documented(minimum=-100, maximum=100)]


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
    stop: _StopText | Annotated[list[_StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, _documented(minimum=-(1 << 63), maximum=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenIdText, _Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    user: str | None = None
    # extensions (names as vLLM and SGLang have them)
    top_k: Annotated[int, _documented(minimum=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, _documented(exclusiveMinimum=0, maximum=10)] | None = None
    min_tokens: Annotated[int, _documented(minimum=0)] | None = None
    stop_token_ids: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None = None
    # not supported yet, on either route
    response_format: Any = None
    prompt_logprobs: Any = None
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
    prompt: Annotated[msgspec.Raw, _documented(anyOf=_PROMPTS)] = msgspec.field(default_factory=msgspec.Raw)
    """A text, a list of texts, a list of token ids or a list of those: `completion_prompts`. As JSON, because it can be
    as large as the body, and what it is made into depends on how it begins."""
    echo: bool | None = None
    logprobs: Annotated[int, _documented(minimum=0, maximum=MAX_LOGPROBS)] | bool | None = None
    """So many most likely tokens with each token; `false`: none, as a body for chat has it."""
    top_logprobs: Any = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct):
    type: Annotated[str, _documented(enum=["text"])]
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


_Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]


class ChatBody(GenerationBody, kw_only=True):
    messages: _Messages | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _documented(minimum=0, maximum=MAX_LOGPROBS)] | None = None
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
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages (the template writes them)."""


class DetokenizeBody(msgspec.Struct):
    tokens: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    model: str | None = None
    skip_special_tokens: bool = False


_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_PARAM = re.compile(r"`\$\.?([^`]*)`")
_TOO_LONG = re.compile(r"Expected `(\w+)` of length <= (\d+)")

completion_decoder = msgspec.json.Decoder(CompletionBody)
chat_decoder = msgspec.json.Decoder(ChatBody)
tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


_CONTENT = ("prompt", "messages", "tokens")
"""What a body may be large by."""


def _outline(body: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    """For the body's fields as pieces of JSON, of which nothing is made yet."""
    names = [name for name in body.__struct_fields__ if name not in _CONTENT]
    return msgspec.json.Decoder(msgspec.defstruct("Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in names]))


_OUTLINES: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {
    body: _outline(body) for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
}


def decode_body(decoder: msgspec.json.Decoder[_BodyT], raw: bytes) -> _BodyT:
    """A body as its struct. InvalidRequest with the field's name where a type or length is wrong or the JSON broken."""
    try:
        if len(raw) > LARGE_BODY_BYTES:
            _look_over(_OUTLINES[decoder.type].decode(raw))
        body = decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if log.isEnabledFor(logging.DEBUG):
        unknown = sorted(set(msgspec.json.decode(raw)) - set(body.__struct_fields__))
        if unknown:
            log.debug("fields that are not known and have no effect: %s", ", ".join(unknown))
    return body


def _look_over(outline: msgspec.Struct) -> None:
    """Objects cost many times their JSON, and decoding cannot be interrupted: refuse what would make too many."""
    for name in outline.__struct_fields__:
        num_bytes = len(getattr(outline, name))
        if num_bytes > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name}: {num_bytes} bytes of JSON; at most {MAX_FIELD_BYTES} are taken", name)


def _invalid(text: str) -> InvalidRequest:
    """The error that says what msgspec says, of the field that it names."""
    what, found = text.split(" - at ")[0], _PARAM.search(text)
    param = found.group(1) if found else ""
    if length := _TOO_LONG.match(what):
        unit = "characters" if length.group(1) == "str" else "entries"
        what = f"at most {length.group(2)} {unit} are taken"
    return InvalidRequest(f"{param or 'the body'}: {what}", param or None)
