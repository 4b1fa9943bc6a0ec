"""A chat's body made of one of `/v1/responses`, and what its answer repeats of the body. Pure; part of `BodyWork`.

Nothing is stored, so `input` has all turns, as in an answer's `output`: adjacent items of the model form one assistant
message.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.bodies import (
    ITEM_TYPES,
    PART_TYPES,
    CalledFunction,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    InputItem,
    InputPart,
    JsonSchemaFormat,
    MessageToolCall,
    ResponseFormat,
    ResponsesBody,
    ResponsesToolChoice,
    TextFormat,
    Tool,
    ToolFunction,
)
from chitu.http.translation import FieldNames, Translation, served_effort, text_of_parts

_NAMES = (
    (re.compile(r"messages(?=\[|\.|\Z).*"), "input"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
)
"""Fields of a chat -> the fields of this route that they are made from."""


def chat_of_responses(body: ResponsesBody, variables: Collection[str], warnings: list[str]) -> Translation:
    """Return the chat. `variables`: what its template reads. Raise InvalidRequest for items and parts that are neither
    text nor calls; `warnings` gets a sentence about what has no effect."""
    if body.input is None or body.input == []:
        raise InvalidRequest("input is required: text, or a list of items", "input")
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        messages += _messages(body.input)
    chosen = body.tool_choice
    choice = ChosenTool(chosen.type, ChosenFunction(chosen.name)) if isinstance(chosen, ResponsesToolChoice) else chosen
    text = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    chat = ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=[Tool(t.type, ToolFunction(t.name, t.description, t.parameters, t.strict)) for t in body.tools or ()],
        tool_choice=choice,
        response_format=_response_format(text) if text is not None else None,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=served_effort(effort, variables, "reasoning.effort", warnings),
        chat_template_kwargs=body.chat_template_kwargs,
        return_proof=body.return_proof,
        return_receipt=body.return_receipt,
    )
    return Translation(chat, FieldNames(_NAMES, range(len(body.tools or ()))))


def _response_format(given: TextFormat) -> ResponseFormat:
    if given.type == "json_schema":
        return ResponseFormat(given.type, JsonSchemaFormat(given.schema))
    return ResponseFormat(given.type, schema=given.schema)


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.type or "message"
        if kind not in ITEM_TYPES:
            raise InvalidRequest(f"{where}.type: {kind[:40]!r} is not supported yet", f"{where}.type")
        if kind == "message":
            if item.role is None or item.content is None:
                raise InvalidRequest(f"{where}: a message has a role and content", where)
            text = _text(item.content, f"{where}.content")
            if item.role == "assistant":
                _of_model(messages, kind).content = text
            else:
                messages.append(ChatMessage(item.role, text))
        elif kind == "function_call":
            if item.name is None or item.call_id is None:
                raise InvalidRequest(f"{where}: a function_call has a name and a call_id", where)
            own = _of_model(messages, kind)
            call = MessageToolCall(CalledFunction(item.name, item.arguments), item.call_id)
            own.tool_calls = [*(own.tool_calls or ()), call]
        elif kind == "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"{where}: a function_call_output has a call_id and an output", where)
            text = _text(item.output, f"{where}.output")
            messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        else:
            _of_model(messages, kind).reasoning_content = _text(item.content or "", f"{where}.content")
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


def _text(given: str | list[InputPart], where: str) -> str:
    if isinstance(given, str):
        return given
    return text_of_parts([(part.type, part.text) for part in given], PART_TYPES, where)


def echo_of(body: ResponsesBody) -> dict[str, Any]:
    """Return the request fields that the answer repeats."""
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "max_output_tokens": body.max_output_tokens,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "text": {"format": _format_of(body)},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
    }


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    given = body.text.format if body.text is not None else None
    if given is None:
        return {"type": "text"}
    fields = {"name": given.name, "description": given.description, "strict": given.strict, "schema": given.schema}
    return {"type": given.type, **{name: value for name, value in fields.items() if value not in (None, msgspec.UNSET)}}
