"""The bodies of the generation routes, `/tokenize` and `/detokenize` as they come: their fields and types. Pure.

Decoded by the routes on the loop thread; read by `request_checks.py`, `sampling_fields.py` and the OpenAPI document.
JSON is read strictly: an escaped half of a surrogate pair, which is no text, is an error here. Fields that nobody knows
are accepted, as OpenAI does (and logged at debug level).
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, TypeVar

import msgspec

from chitu.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_N = 128
MAX_STOPS = 16
MAX_DETOKENIZE = 1 << 20
"""Token ids in one body."""


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
