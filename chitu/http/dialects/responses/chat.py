"""A chat's body made of one of `/v1/responses`, and what its answer repeats of the body. Pure; part of `BodyWork`.

Nothing is stored, so `input` has all turns, as in an answer's `output` (`items.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import ChatBody, ChatMessage, JsonSchemaFormat, ResponseFormat
from chitu.http.ask.images import SentImages
from chitu.http.ask.parts import LeftOut
from chitu.http.ask.sampling import NO_LIMIT
from chitu.http.ask.translation import FieldNames, Translation, served_effort
from chitu.http.dialects.responses.bodies import (
    ENCRYPTED,
    INCLUDABLE,
    NamespacedTool,
    ResponsesBody,
    ResponsesTool,
    TextFormat,
)
from chitu.http.dialects.responses.items import messages_of
from chitu.http.dialects.responses.tools import CalledTool, OfferedTools
from chitu.protocol import SamplingParams

_NAMES = (
    (re.compile(r"messages(?=\[|\.|\Z).*"), "input"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"tool_choice\.allowed_tools\.tools\[\d+\]"), "tool_choice.tools"),
)
"""Fields of a chat -> the fields of this route that they are made from."""


def chat_of_responses(
    body: ResponsesBody, variables: Collection[str], warnings: list[str], images: SentImages | None = None
) -> Translation:
    """Return the chat. `variables`: what its template reads; `images`: see `chat_messages`. Raise InvalidRequest for
    items whose meaning would be lost, and if the last turn asks about what is neither text nor an image; `warnings`
    gets a sentence about what has no effect, and about what the prompt leaves out."""
    if body.input is None or body.input == []:
        raise InvalidRequest("input is required: text, or a list of items", "input")
    _check(body)
    left = LeftOut()
    offered = OfferedTools(body, left)
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    message_places: list[str] = []
    if isinstance(body.input, str):
        messages.append(ChatMessage("user", body.input))
    else:
        messages, message_places = messages_of(body.input, messages, offered, warnings, images)
    tools, custom_places, enforced = offered.functions(warnings)
    choice = offered.choice(body.tool_choice, left)
    left.warn(warnings)
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
        speculation=body.speculation,
    )
    places = [tool.place for tool in offered.by_name.values()]
    return Translation(chat, FieldNames(_NAMES, places, (), custom_places, message_places), enforced, images)


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


def _shown(tool: ResponsesTool | NamespacedTool) -> dict[str, Any]:
    """Return a tool as the answer repeats it: functions with all their fields, other tools with those that are set."""
    fields = msgspec.structs.asdict(tool)
    if isinstance(tool, ResponsesTool) and tool.tools is not None:
        fields["tools"] = [_shown(inner) for inner in tool.tools]
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
    tools: Mapping[str, CalledTool]
    """Tools by their names in the prompt."""
    encodes_reasoning: bool = False
    """The answer has its reasoning encoded, too (`ENCRYPTED`)."""

    @classmethod
    def of(cls, body: ResponsesBody, sampling: SamplingParams) -> Repeated:
        fields = {
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
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
        tools = {name: tool.called for name, tool in OfferedTools(body, LeftOut()).by_name.items()}
        return cls(fields, tools, ENCRYPTED in (body.include or ()))
