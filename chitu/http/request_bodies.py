"""The bodies of the generation routes, `/tokenize` and `/detokenize` as they come: what is served of them, its types
and bounds. Pure.

Made by `body_decoder.py`; read by `request_checks.py`, `sampling_fields.py` and the OpenAPI document. All other fields
that clients have are in `request_fields.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
)

MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
"""Of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""A client's; eos may be among those that an instance gets."""
MAX_WORDS = MAX_BAD_WORDS // 2
"""Of `bad_words`: each is looked for with a space ahead, too."""
MAX_WORD_CHARS = 64
MAX_CHOICES = 1024
"""Of `guided_choice`."""
MAX_CHOICE_CHARS = 1024
MAX_SALT_CHARS = 256
"""Of `cache_salt`."""
MAX_MESSAGES = 2048
MAX_PARTS = 1024
"""Of one message's content."""
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 64
"""Of a message's `name`."""
MAX_TOOLS = 128
"""That one chat offers."""
MAX_TOOL_CALLS = 128
"""Of one message."""
MAX_TOOL_NAME_CHARS = 128
MAX_ID_CHARS = 128
"""Of a tool call's id."""
MAX_TEMPLATE_KWARGS = 64
"""Variables for the chat template that one request gives."""
MAX_PROMPTS = 1024
"""Prompts in one body, and choices: each is a request of its own."""
MAX_TOKENS = 1 << 18
"""Token ids that `/detokenize` takes; what `/tokenize` gives, unless requests may have more."""
MAX_RID_CHARS = 160
"""Of a request's id with the prefix of an answer's."""
TOOL_CHOICES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of reasoning: what OpenAI and vLLM know."""
LARGE_BODY_BYTES = 16 << 10
"""Beyond it a body is looked over before anything is made of it, and is worked on in a process of its own
(`body_reader.py`)."""
MAX_FIELD_BYTES = 64 << 10
"""In a large body, the JSON of every field that holds neither text nor tokens."""
MAX_TOOLS_BYTES = 256 << 10
"""The same of `tools`."""


Unread = msgspec.Raw | msgspec.UnsetType
"""A field that is left as JSON, because nothing is made of it."""


def documented(**schema: Any) -> msgspec.Meta:
    """For the OpenAPI document only: a wrong type is msgspec's error, a wrong value that of the functions below."""
    return msgspec.Meta(extra_json_schema=schema)


_Count = Annotated[int, documented(minimum=1)]
_Penalty = Annotated[float, documented(minimum=-2, maximum=2)]
_Share = Annotated[float, documented(minimum=0, maximum=1)]
_StopText = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS, extra_json_schema={"minLength": 1})]
_BadWord = Annotated[str, msgspec.Meta(max_length=MAX_WORD_CHARS, extra_json_schema={"pattern": "\\S"})]
_BadTokens = Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
_TokenIdText = Annotated[str, documented(pattern="^[0-9]+$")]
_TokenId = Annotated[int, documented(minimum=0)]
_Bias = Annotated[float, documented(minimum=-100, maximum=100)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`None` is the same as leaving a field out."""

    model: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Unread = msgspec.UNSET


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Annotated[msgspec.Raw | msgspec.UnsetType, documented(type="object")] = msgspec.UNSET
    # without effect
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


_Schema = Annotated[msgspec.Raw | msgspec.UnsetType, documented(anyOf=[{"type": "object"}, {"type": "string"}])]
_Choices = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=MAX_CHOICE_CHARS)]], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)
]
_GrammarText = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    json: _Schema = msgspec.UNSET
    json_object: bool | None = None
    regex: _GrammarText | None = None
    choice: _Choices | None = None
    grammar: _GrammarText | None = None
    # without effect
    disable_fallback: Unread = msgspec.UNSET


class GenerationBody(Body, kw_only=True):
    """What both routes share."""

    # OpenAI
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, documented(minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] | None = None
    n: Annotated[int, documented(minimum=1, maximum=MAX_N)] | None = None
    stop: _StopText | Annotated[list[_StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, documented(minimum=-(1 << 63), maximum=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    response_format: ResponseFormat | None = None
    logit_bias: Annotated[dict[_TokenIdText, _Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    # extensions (names as vLLM and SGLang have them, `cache_prompt` as llama.cpp)
    top_k: Annotated[int, documented(minimum=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, documented(exclusiveMinimum=0, maximum=10)] | None = None
    min_tokens: Annotated[int, documented(minimum=0)] | None = None
    stop_token_ids: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: (
        Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS, extra_json_schema={"minItems": 1})]
        | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema = msgspec.UNSET
    guided_regex: _GrammarText | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _GrammarText | None = None
    bad_words: Annotated[list[_BadWord | _BadTokens], msgspec.Meta(max_length=MAX_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, documented(minimum=-1)] | None = None
    return_token_ids: bool | None = None
    return_proof: bool | None = None
    return_page_sums: bool | None = None
    return_receipt: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    prompt_logprobs: Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)] | bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None = None
    cache_prompt: bool | None = None


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string"}
_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
_PROMPTS = [_TEXT, _list_of(_TEXT), _TOKEN_IDS, _list_of(_TOKEN_IDS)]


class CompletionBody(GenerationBody, kw_only=True):
    prompt: Annotated[msgspec.Raw, documented(anyOf=_PROMPTS)] = msgspec.field(default_factory=msgspec.Raw)
    """A text, a list of texts, a list of token ids or a list of those: `completion_prompts`. As JSON, because it can be
    as large as the body, and what it is made into depends on how it begins."""
    echo: bool | None = None
    logprobs: Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)] | bool | None = None
    """So many most likely tokens with each token; `false`: none, as a body for chat has it."""
    best_of: int | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["text"])]
    text: str | None = None
    # without effect
    cache_control: Unread = msgspec.UNSET
    prompt_cache_breakpoint: Unread = msgspec.UNSET


ToolName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]
CallId = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    arguments: str | None = None
    """JSON, as the model wrote it."""


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    function: CalledFunction
    id: CallId | None = None
    type: Annotated[str, documented(enum=["function"])] | None = None
    # without effect
    index: Unread = msgspec.UNSET


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["function"])]
    function: ToolFunction


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, documented(enum=["function"])]
    function: ChosenFunction


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)]
    content: str | Annotated[list[TextPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[MessageToolCall], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # refused unless empty
    function_call: Unread = msgspec.UNSET
    audio: Unread = msgspec.UNSET
    # without effect
    refusal: Unread = msgspec.UNSET
    provider_specific_fields: Unread = msgspec.UNSET
    annotations: Unread = msgspec.UNSET
    type: Unread = msgspec.UNSET


_Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
_Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
TemplateKwargs = Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_TEMPLATE_KWARGS)]


class ChatBody(GenerationBody, kw_only=True):
    messages: _Messages | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, documented(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: _Tools | None = None
    tool_choice: ChosenTool | Annotated[str, documented(enum=list(TOOL_CHOICES))] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, documented(enum=list(EFFORTS))] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None


class TokenizeBody(Body, kw_only=True):
    prompt: str | None = None
    messages: _Messages | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: _Tools | None = None
    add_generation_prompt: bool | None = None
    """Default true: of messages, what the model's answer begins behind."""
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages (the template writes them)."""


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RID_CHARS)]


class DetokenizeBody(Body, kw_only=True):
    tokens: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    skip_special_tokens: bool | None = None
