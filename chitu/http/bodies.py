"""The error of a body whose text has a part of a character, and the field that has it. Pure; part of `BodyWork`.

Clients that cut texts by bytes, or by UTF-16's units, send half of an escaped surrogate pair or bytes that are not
UTF-8. Neither is text. Called only for a body that could not be decoded.

Request bodies of the generation routes, `/tokenize`, `/detokenize` and `/abort_request`: served fields with their
types and bounds. Pure.

`body_decoder.py` creates them; `bodies.py`, `sampling_fields.py` and the OpenAPI document read them. All other
fields that clients send are in `request_fields.py`.

Checks of a body that its types cannot express: the shape of prompts, the content of messages. Pure.

Called by `jobs.py` (and by `/tokenize`, for messages), as part of `BodyWork`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
)

NAMED_CHARS = 100
"""Characters of each name in a path."""
_HALF = re.compile(
    r"(?:[^\\\udc80-\udcff]++|\\(?!u[dD][89a-fA-F]).|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+(\\u[dD]|[\udc80-\udcff])",
    re.DOTALL,
)
"""A text up to its first half of a surrogate pair that is escaped, or its first byte that is not UTF-8."""
_LEXEMES = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\],:]', re.DOTALL)


def cut_character(raw: bytes | bytearray, field: str = "") -> InvalidRequest | None:
    """Return the error of JSON with a part of a character; None if it has none. `field`: name of the field whose value
    this is, if it is not the whole body."""
    text = raw.decode(errors="surrogateescape")
    found = _HALF.match(text)
    if found is None:
        return None
    at = found.start(1)
    param = (field + _place_of(text, at)).removeprefix(".") or None
    if text[at] == "\\":
        what = "half of a surrogate pair: a character was cut in two"
    else:
        what = "a byte that is not UTF-8: a character was cut in two, or the text has another encoding"
    return InvalidRequest(f"{param or 'the body'} has {what} (at character {at} of its JSON)", param)


def _place_of(text: str, at: int) -> str:
    """Return the path of the value in which a position of JSON is. Follows brackets and strings up to it."""
    path: list[str | int] = []
    key = ""
    for found in _LEXEMES.finditer(text, 0, at):
        part = found[0]
        if part in ("{", "["):
            path.append("" if part == "{" else 0)
        elif part in ("}", "]"):
            if path:
                path.pop()
        elif part == "," and path:
            place = path[-1]
            path[-1] = place + 1 if isinstance(place, int) else ""
        elif part == ":" and path:
            path[-1] = key
        elif part.startswith('"'):
            key = part[1:-1]
    shown = [f"[{place}]" if isinstance(place, int) else f".{place[:NAMED_CHARS]}" for place in path if place != ""]
    return "".join(shown)


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


# -------------------------------------------------------------------------------------------------------------- prompts


_SHAPE = "prompt must be a string, a list of strings, a list of token ids, or a list of those (none of them empty)"
_Several = msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)
_Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
_text = msgspec.json.Decoder(str)
_texts: msgspec.json.Decoder[list[str]] = msgspec.json.Decoder(Annotated[list[str], _Several])
_ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(_Ids)
_ids_of_several: msgspec.json.Decoder[list[list[int]]] = msgspec.json.Decoder(Annotated[list[_Ids], _Several])
_BRACKET = ord("[")
_TEXTS = re.compile(rb'\[\s*"')
_LISTS = re.compile(rb"\[\s*\[")


def completion_prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """Return the prompts of a body, all texts or all token ids. Raise InvalidRequest for any other shape. Decodes in
    place, because no other request has a turn while a large body is copied."""
    given = memoryview(body.prompt)
    if not given or bytes(given[:5]) == b"null":
        raise InvalidRequest("prompt is required", "prompt")
    try:
        if given[0] != _BRACKET:
            return [_text.decode(given)]
        if _TEXTS.match(given):
            return _texts.decode(given)
        if not _LISTS.match(given):
            return [_ids.decode(given)]
        # Count before decoding: a decoded list costs many times the three bytes of its JSON.
        if bytes(given).count(b"[") <= MAX_PROMPTS + 1:
            return _ids_of_several.decode(given)
    except msgspec.ValidationError as error:
        if "length <=" not in str(error):
            raise InvalidRequest(_SHAPE, "prompt") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        broken = InvalidRequest(f"prompt is not valid JSON: {error}", "prompt")
        raise cut_character(bytes(given), "prompt") or broken from error
    raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts are taken", "prompt")


ROLES = {"developer": "system"}
"""OpenAI's newer name of a role -> the name that chat templates use."""


_EMPTY = (b"null", b'""', b"[]", b"{}")


def chat_messages(given: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them. Raise InvalidRequest for content that is not text."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if message.function_call is not msgspec.UNSET or message.audio is not msgspec.UNSET:
            for name in ("function_call", "audio"):
                value = getattr(message, name)
                if value is not msgspec.UNSET and bytes(value) not in _EMPTY:
                    raise InvalidRequest(f"{where}.{name} is not supported yet", f"{where}.{name}")
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise InvalidRequest(f"{where}.content is required", f"{where}.content")
            content = ""  # templates add text to it
        if not isinstance(content, str):
            content = text_of_parts([(part.type, part.text) for part in content], ("text",), f"{where}.content")
        message_of_template: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            message_of_template["name"] = message.name
        if message.tool_calls:
            message_of_template["tool_calls"] = [_call_of_template(call, where) for call in message.tool_calls]
        if message.tool_call_id:
            message_of_template["tool_call_id"] = message.tool_call_id
        if reasoning := message.reasoning_content or message.reasoning:
            message_of_template["reasoning_content"] = reasoning
        messages.append(message_of_template)
    return messages


def text_of_parts(parts: Sequence[tuple[str, str | None]], types: Sequence[str], where: str) -> str:
    """Return parts of content, each a type and a text, as one text: joined by line breaks, as vLLM and llama.cpp do.
    Raise InvalidRequest for a part of another type, and for one without text."""
    for i, (kind, text) in enumerate(parts):
        if kind not in types:
            known = ", ".join(map(repr, types))
            raise InvalidRequest(f"{where}[{i}]: only {known} parts are supported, not {kind[:40]!r}", f"{where}[{i}]")
        if text is None:
            raise InvalidRequest(f"{where}[{i}].text is required", f"{where}[{i}].text")
    return "\n".join([text for _, text in parts if text is not None])


def _call_of_template(call: MessageToolCall, where: str) -> dict[str, Any]:
    """Return a call as the chat template takes it. Arguments become an object, because templates write the JSON
    themselves; arguments that are no JSON object stay text."""
    if call.type not in (None, "function"):
        raise InvalidRequest(f"{where}.tool_calls: only calls of type 'function' are supported", f"{where}.tool_calls")
    arguments: Any = call.function.arguments or "{}"
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        arguments = value
    of_template = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return {"id": call.id, **of_template} if call.id else of_template


def offered_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as the chat template takes them, with fields in the order that models are trained with. Raise
    InvalidRequest if two tools have the same name."""
    if not tools:
        return None
    offered: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        given = tool.function
        if given.name in offered:
            raise InvalidRequest(f"tools[{i}]: {given.name!r} is there twice", f"tools[{i}].function.name")
        function: dict[str, Any] = {"name": given.name}
        if given.description is not None:
            function["description"] = given.description
        if given.parameters is not None:
            function["parameters"] = given.parameters
        offered[given.name] = {"type": "function", "function": function}
    return list(offered.values())


class ChosenTools(NamedTuple):
    offered: list[dict[str, Any]] | None
    """Tools in the prompt; None if the body offers none, or forbids calls."""
    enforced: list[dict[str, Any]]
    """Tools whose calls must follow their schemas; empty: calls are not constrained."""
    is_required: bool = False
    """The answer must be a call of one of `enforced`."""


def chosen_tools(body: ChatBody) -> ChosenTools:
    """Return the tools of the body that its `tool_choice` selects. Raise InvalidRequest if it names no tool of them."""
    tools, choice = offered_tools(body.tools), body.tool_choice
    if choice is None or choice == "auto":
        return ChosenTools(tools, _strict(body.tools or (), tools or ()))
    if choice == "none":
        return ChosenTools(None, [])
    if isinstance(choice, str) and choice not in TOOL_CHOICES:
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(TOOL_CHOICES)} or a function of tools, not {choice[:40]!r}",
            "tool_choice",
        )
    if not tools:
        raise InvalidRequest("tool_choice is allowed only with tools", "tool_choice")
    if isinstance(choice, str):
        return ChosenTools(tools, tools, True)
    named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
    if not named:
        raise InvalidRequest(f"tool_choice: {choice.function.name[:80]!r} is none of tools", "tool_choice")
    return ChosenTools(tools, named, True)


def _strict(given: Sequence[Tool], offered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that constrain calls if at least one of them is strict. A tool that is not strict accepts any
    object. Empty if no tool is strict."""
    if not any(tool.function.strict for tool in given):
        return []
    return [
        tool if own.function.strict else {"function": {"name": own.function.name}}
        for own, tool in zip(given, offered, strict=True)
    ]


def reasoning_variables(effort: str | None, known: Collection[str]) -> dict[str, Any]:
    """Return `reasoning_effort` as variables of a template that reads `known`. Raise InvalidRequest for an unknown
    effort, and for any effort except `none` if the template reads no such variable."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    variables: dict[str, Any] = {}
    if "reasoning_effort" in known:
        variables["reasoning_effort"] = effort
    if "enable_thinking" in known:
        variables["enable_thinking"] = effort != "none"
    if not variables and effort != "none":
        raise InvalidRequest("reasoning_effort: the model's chat template has no such choice", "reasoning_effort")
    return variables


SET_OTHERWISE = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that `chat_template_kwargs` may not set."""


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template takes them. Raise InvalidRequest for a name in `SET_OTHERWISE`."""
    for name in SET_OTHERWISE:
        if given and name in given:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is set by other fields; leave it out", f"chat_template_kwargs.{name}"
            )
    return given or {}
