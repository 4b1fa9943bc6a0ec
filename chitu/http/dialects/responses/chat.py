"""A chat's body made of one of `/v1/responses`, and what its answer repeats of the body. Pure; part of `BodyWork`.

Nothing is stored, so `input` has all turns, as in an answer's `output`: adjacent items of the model form one assistant
message.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import (
    AllowedTool,
    AllowedTools,
    CalledFunction,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    JsonSchemaFormat,
    MessageToolCall,
    ResponseFormat,
    ToolFunction,
)
from chitu.http.ask.sampling import NO_LIMIT
from chitu.http.ask.translation import FieldNames, Translation, add_text, functions_of, left_out, served_effort, text_of
from chitu.http.dialects.responses.bodies import (
    ENCRYPTED,
    INCLUDABLE,
    ITEM_TYPES,
    PART_TYPES,
    InputItem,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)
from chitu.http.dialects.responses.custom_tools import arguments_of, custom_function

_NAMES = (
    (re.compile(r"messages(?=\[|\.|\Z).*"), "input"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"tool_choice\.allowed_tools\.tools\[\d+\]"), "tool_choice.tools"),
)
"""Fields of a chat -> the fields of this route that they are made from."""


_ENCODED = "chitu1."
_HOSTED = (
    *("web_search", "file_search", "image_generation", "code_interpreter", "computer", "local_shell", "shell"),
    *("apply_patch", "tool_search", "mcp"),
)
LEFT_OUT_ITEMS = frozenset(
    {
        *(f"{tool}_call" for tool in _HOSTED),
        *(f"{tool}_call_output" for tool in _HOSTED),
        *("tool_search_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("program", "program_output", "additional_tools", "compaction", "compaction_trigger"),
    }
)
"""Items of what runs on other servers alone."""


def encoded_reasoning(text: str) -> str:
    """Return reasoning as text that clients keep and send back without looking at it. It is not encrypted: the client
    gets the same text in plain words."""
    return _ENCODED + b64encode(text.encode()).decode()


def decoded_reasoning(text: str) -> str:
    """Return the reasoning in such a text; empty if it is of another server."""
    if not text.startswith(_ENCODED):
        return ""
    try:
        return b64decode(text.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return ""


def chat_of_responses(body: ResponsesBody, variables: Collection[str], warnings: list[str]) -> Translation:
    """Return the chat. `variables`: what its template reads. Raise InvalidRequest for items and parts that are neither
    text nor calls; `warnings` gets a sentence about what has no effect."""
    if body.input is None or body.input == []:
        raise InvalidRequest("input is required: text, or a list of items", "input")
    _check(body)
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        messages = _messages(body.input, messages, warnings)
    custom_places: list[int] = []
    enforced: dict[str, dict[str, Any]] = {}

    def function_of(tool: ResponsesTool, name: str, place: int) -> ToolFunction:
        if tool.type == "function":
            return ToolFunction(name, tool.description, tool.parameters, tool.strict)
        function, followed = custom_function(tool, f"tools[{place}]", warnings)
        custom_places.append(place)
        if followed is not None:
            enforced[name] = followed
        return function

    tools, places = functions_of(body.tools or [], ("function", "custom"), function_of, warnings)
    choice = _choice(body.tool_choice, warnings)
    text = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    chat = ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(text) if text is not None else None,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=served_effort(effort, variables, "reasoning.effort", warnings),
        chat_template_kwargs=body.chat_template_kwargs,
        return_proof=body.return_proof or body.return_token_ids,
        return_receipt=body.return_receipt,
        return_token_ids=body.return_token_ids,
    )
    return Translation(chat, FieldNames(_NAMES, places, (), custom_places), enforced)


def _choice(given: ResponsesToolChoice | str | None, warnings: list[str]) -> ChosenTool | str | None:
    if not isinstance(given, ResponsesToolChoice):
        return given
    if given.type != "allowed_tools":
        if given.name is None:
            raise InvalidRequest("tool_choice.name is required", "tool_choice.name")
        return ChosenTool("function", ChosenFunction(given.name))
    allowed, others = [], {}
    for i, tool in enumerate(given.tools or ()):
        where = f"tool_choice.tools[{i}]"
        if tool.type not in ("function", "custom"):
            others[where] = tool.type
        elif tool.name is None:
            raise InvalidRequest(f"{where}.name is required", f"{where}.name")
        else:
            allowed.append(AllowedTool(ChosenFunction(tool.name)))
    if not allowed:
        raise InvalidRequest("tool_choice.tools must hold a tool that the client runs", "tool_choice.tools")
    if others:
        warnings.append(left_out(others))
    return ChosenTool("allowed_tools", allowed_tools=AllowedTools(allowed, given.mode or "auto"))


def _check(body: ResponsesBody) -> None:
    """Raise InvalidRequest for values of fields that ask for what is not served."""
    for i, value in enumerate(body.include or ()):
        if value not in INCLUDABLE:
            raise InvalidRequest(f"include[{i}]: {value[:40]!r} is not supported yet", f"include[{i}]")
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest("truncation must be auto or disabled", "truncation")


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type == "json_schema":
        return ResponseFormat(given.type, JsonSchemaFormat(given.schema))
    return ResponseFormat(given.type, schema=given.schema)


def _messages(items: list[InputItem], messages: list[ChatMessage], warnings: list[str]) -> list[ChatMessage]:
    """Return the messages with those of the items. Those of the system in a row are one, since many chat templates take
    only one."""
    others: dict[str, str] = {}
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.type or "message"
        if kind in LEFT_OUT_ITEMS:
            others[where] = kind
            continue
        if kind not in ITEM_TYPES:
            raise InvalidRequest(f"{where}.type: {kind[:40]!r} is not supported yet", f"{where}.type")
        if kind == "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{where}: a message has a role and content", where)
            text = text_of(item.content, PART_TYPES, f"{where}.content")
            if item.role == "assistant":
                _of_model(messages, kind).content = text
            elif item.role in ("system", "developer"):
                add_text(messages, "system", text)
            else:
                messages.append(ChatMessage(item.role, text))
        elif kind in ("function_call", "custom_tool_call"):
            if item.name is None or item.call_id is None:
                raise InvalidRequest(f"{where}: a {kind} has a name and a call_id", where)
            own = _of_model(messages, kind)
            arguments = item.arguments if kind == "function_call" else arguments_of(item.input or "")
            call = MessageToolCall(CalledFunction(item.name, arguments), item.call_id)
            own.tool_calls = [*(own.tool_calls or ()), call]
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"{where}: a {kind} has a call_id and an output", where)
            text = text_of(item.output, PART_TYPES, f"{where}.output")
            messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        else:
            text = text_of(item.content or "", PART_TYPES, f"{where}.content")
            text = text or decoded_reasoning(item.encrypted_content or "")
            _of_model(messages, kind).reasoning_content = text
    if others:
        warnings.append(left_out(others))
    # Templates have no message of reasoning alone.
    return [message for message in messages if message.content is not None or message.tool_calls]


def _of_model(messages: list[ChatMessage], kind: str) -> ChatMessage:
    """Return the assistant message that an item of this kind belongs to: the last one, or a new one."""
    last = messages[-1] if messages else None
    if (
        last is None
        or last.role != "assistant"
        or (kind == "message" and last.content is not None)
        or (kind == "reasoning" and last.tool_calls)
    ):
        last = ChatMessage("assistant")
        messages.append(last)
    return last


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as the answer repeats it: functions with all their fields, other tools with those that are set."""
    fields = msgspec.structs.asdict(tool)
    always = ("description", "parameters", "strict") if tool.type == "function" else ()
    return {name: value for name, value in fields.items() if name in always or value not in (None, msgspec.UNSET)}


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    if given is None:
        return {"type": "text"}
    fields = {"name": given.name, "description": given.description, "strict": given.strict, "schema": given.schema}
    return {"type": given.type, **{name: value for name, value in fields.items() if value not in (None, msgspec.UNSET)}}


class Repeated(NamedTuple):
    """What an answer has of its request."""

    fields: dict[str, Any]
    """Fields that it repeats."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools that take text (`custom_tools.py`)."""
    encodes_reasoning: bool = False
    """The answer has its reasoning encoded, too (`ENCRYPTED`)."""

    @classmethod
    def of(cls, body: ResponsesBody) -> Repeated:
        fields = {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "max_output_tokens": None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens,
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown(tool) for tool in body.tools or ()],
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "text": {"format": _format_of(body)},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }
        custom = [tool.name for tool in body.tools or () if tool.type == "custom" and tool.name is not None]
        return cls(fields, frozenset(custom), ENCRYPTED in (body.include or ()))
