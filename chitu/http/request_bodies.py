"""Request bodies of the generation routes, `/tokenize`, `/detokenize` and `/abort_request`: served fields with their
types and bounds. Pure.

`body_decoder.py` creates them; `request_checks.py`, `sampling_fields.py` and the OpenAPI document read them. All other
fields that clients send are in `request_fields.py`.
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
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""Stop token ids that a client may give. An instance may get eos ids in addition."""
MAX_WORD_CHARS = 64
MAX_CHOICES = 1024
"""Entries of `guided_choice`."""
MAX_CHOICE_CHARS = 1024
MAX_SALT_CHARS = 256
"""Characters of `cache_salt`."""
MAX_MESSAGES = 2048
MAX_PARTS = 1024
"""Parts of one message's content."""
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 64
"""Characters of a message's `name`."""
MAX_TOOLS = 128
"""Tools that one chat offers."""
MAX_TOOL_CALLS = 128
"""Tool calls of one message."""
MAX_TOOL_NAME_CHARS = 128
MAX_ID_CHARS = 1 << 14
"""Characters of a tool call's id: some providers put a signature of thousands of characters into it."""
MAX_TEMPLATE_KWARGS = 64
"""Variables for the chat template that one request gives."""
MAX_PROMPTS = 1024
"""Prompts in one body, and choices over all of them; each choice is a request of its own."""
MAX_TOKENS = 1 << 18
"""Token ids that `/detokenize` accepts. `/tokenize` returns at most this many, or `max_model_len` if that is more."""
MAX_RID_CHARS = 160
"""Characters of a request id, including the prefix of a response id."""
TOOL_CHOICES = ("auto", "none", "required")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Reasoning efforts of OpenAI and vLLM."""
LARGE_BODY_BYTES = 16 << 10
"""A larger body is checked before it is decoded, and is processed in a separate process (`body_reader.py`)."""
MAX_FIELD_BYTES = 64 << 10
"""Bytes of JSON, in a large body, of each field that holds neither text nor tokens."""
MAX_TOOLS_BYTES = 256 << 10
"""Bytes of JSON of `tools`, in a large body."""


Unread = msgspec.Raw | msgspec.UnsetType
"""A field that stays undecoded JSON, because its value is not used."""


def documented(**schema: Any) -> msgspec.Meta:
    """Return metadata for the OpenAPI document only: the request checks the value."""
    return msgspec.Meta(extra_json_schema=schema)


TokenCount = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
_NumChoices = Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]
_NumLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_StopText = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS, extra_json_schema={"minLength": 1})]
_BadWord = Annotated[str, msgspec.Meta(max_length=MAX_WORD_CHARS, extra_json_schema={"pattern": "\\S"})]
_BadTokens = Annotated[list[int], msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
_TokenIdText = Annotated[str, documented(pattern="^[0-9]+$")]
_TokenId = Annotated[int, documented(minimum=0)]
_Bias = Annotated[float, documented(minimum=-100, maximum=100)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body. `None` is the same as leaving a field out."""

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
    schema: Annotated[msgspec.Raw | msgspec.UnsetType, documented(type="object")] = msgspec.UNSET


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
    """Fields that completions and chats share."""

    # OpenAI
    max_tokens: Annotated[int, documented(minimum=1)] | None = None
    """Without effect beside `max_completion_tokens`, also if it is out of range."""
    max_completion_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: _NumChoices | None = None
    stop: _StopText | Annotated[list[_StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    response_format: ResponseFormat | None = None
    logit_bias: Annotated[dict[_TokenIdText, _Bias], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    # extensions (names as vLLM and SGLang have them, `cache_prompt` as llama.cpp)
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """-1 and 0: off."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
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
    bad_words: Annotated[list[_BadWord | _BadTokens], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_proof: bool | None = None
    return_page_sums: bool | None = None
    return_receipt: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    prompt_logprobs: _NumLogprobs | bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None = None
    cache_prompt: bool | None = None


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string"}
_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
_PROMPTS = [_TEXT, _list_of(_TEXT), _TOKEN_IDS, _list_of(_TOKEN_IDS)]


class CompletionBody(GenerationBody, kw_only=True):
    prompt: Annotated[msgspec.Raw, documented(anyOf=_PROMPTS)] = msgspec.field(default_factory=msgspec.Raw)
    """A text, a list of texts, a list of token ids or a list of such lists; see `completion_prompts`. Undecoded JSON,
    because it can be as large as the body, and its first characters decide how it is decoded."""
    echo: bool | None = None
    logprobs: _NumLogprobs | bool | None = None
    """Number of most likely tokens returned with each token; `false`: no logprobs, as in a chat body."""
    best_of: _NumChoices | None = None


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
    # without effect
    cache_control: Unread = msgspec.UNSET


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolFunction
    # without effect
    cache_control: Unread = msgspec.UNSET


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
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
    id: Unread = msgspec.UNSET
    thinking_blocks: Unread = msgspec.UNSET
    reasoning_details: Unread = msgspec.UNSET
    metadata: Unread = msgspec.UNSET
    cache_control: Unread = msgspec.UNSET


_Messages = Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
_Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
TemplateKwargs = Annotated[dict[str, Any], msgspec.Meta(max_length=MAX_TEMPLATE_KWARGS)]


class ChatBody(GenerationBody, kw_only=True):
    messages: _Messages | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None
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
    """Default true: the rendered messages end with the text that opens the model's answer."""
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages (the template writes them)."""


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RID_CHARS)]


class DetokenizeBody(Body, kw_only=True):
    tokens: Annotated[list[_TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
    skip_special_tokens: bool | None = None
