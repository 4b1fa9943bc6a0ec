"""A chat's messages, tools and variables as the model's chat template takes them. Pure; part of `BodyWork`.

Checks what the types of a body cannot express: the content of messages, the choice of tools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import EFFORTS, TOOL_CHOICES, ChatBody, ChatMessage, MessageToolCall, Tool
from chitu.http.ask.translation import text_of

ROLES = {"developer": "system"}
"""OpenAI's newer name of a role -> the name that chat templates use."""
_EMPTY = (b"null", b'""', b"[]", b"{}")
SET_OTHERWISE = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that `chat_template_kwargs` may not set."""


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
        content = text_of(content, ("text",), f"{where}.content")
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
    return [tool if own.function.strict else of_any_arguments(tool) for own, tool in zip(given, offered, strict=True)]


def of_any_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose calls may have any object for arguments."""
    return {"function": {"name": tool["function"]["name"]}}


def end_of_prompt(begins: bool | None, continues: bool | None) -> tuple[bool, bool]:
    """Return whether a prompt ends with what precedes the model's answer, and whether with its last message. Raise
    InvalidRequest if it should do both."""
    if begins and continues:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
        )
    return begins is not False and not continues, bool(continues)


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


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template takes them. Raise InvalidRequest for a name in `SET_OTHERWISE`."""
    for name in SET_OTHERWISE:
        if given and name in given:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is set by other fields; leave it out", f"chat_template_kwargs.{name}"
            )
    return given or {}
