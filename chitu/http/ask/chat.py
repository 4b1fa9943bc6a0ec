"""A chat's messages, tools and variables as the model's chat template takes them. Pure; part of `BodyWork`.

Checks what the types of a body cannot express: the content of messages, the choice of tools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import (
    EFFORTS,
    TOOL_CHOICES,
    ChatBody,
    ChatMessage,
    ImageAtURL,
    MessageToolCall,
    TextPart,
    Tool,
    Unread,
)
from chitu.http.ask.images import SentImages
from chitu.http.ask.parts import LeftOut, Reading, question_start, read_file, required_text, text_of
from chitu.images.videos import MAX_FPS

SEEING = ("user", "tool")
"""Roles of turns in which a model with vision sees images."""
IMAGE_TYPES = ("image_url", "input_image", "image", "computer_screenshot")
VIDEO_TYPE = "video_url"
ROLES = {"developer": "system"}
"""OpenAI's newer name of a role -> the name that chat templates use."""
_EMPTY = (b"null", b'""', b"[]", b"{}")
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""
SET_OTHERWISE = ("messages", "tools", "add_generation_prompt")
"""Variables of chat templates that `chat_template_kwargs` may not set."""


def chat_messages(
    given: list[ChatMessage] | None, warnings: list[str] | None = None, images: SentImages | None = None
) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them. Content that is no text is replaced, and `warnings` gets a
    sentence about it; if the last turn asks about it, raise InvalidRequest. `images` gets the images, which have marks
    in the content; None if the model has no vision."""
    if not given:
        raise InvalidRequest("messages must hold at least one message", "messages")
    messages = []
    left, question = LeftOut(images), question_start([message.role for message in given])
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if message.function_call is not msgspec.UNSET or message.audio is not msgspec.UNSET:
            for name in ("function_call", "audio"):
                value = getattr(message, name)
                if value is not msgspec.UNSET and bytes(value) not in _EMPTY:
                    raise InvalidRequest(f"{where}.{name} is not supported yet", f"{where}.{name}")
        is_asked = i >= question and message.role == "user"
        own = left if images is None or message.role in SEEING else left.without_images
        content, thought = _content(message, f"{where}.content", own, is_asked)
        message_of_template: dict[str, Any] = {"role": ROLES.get(message.role, message.role), "content": content}
        if message.name is not None:
            message_of_template["name"] = message.name
        if message.tool_calls:
            message_of_template["tool_calls"] = [_call_of_template(call, where) for call in message.tool_calls]
        if message.tool_call_id:
            message_of_template["tool_call_id"] = message.tool_call_id
        reasoning = message.reasoning_content or message.reasoning or ""
        if thought and thought not in reasoning:  # some clients send it as a part and as a field
            reasoning = f"{reasoning}\n{thought}" if reasoning else thought
        if reasoning:
            message_of_template["reasoning_content"] = reasoning
        messages.append(message_of_template)
    if warnings is not None:
        left.warn(warnings)
    return messages


def _content(message: ChatMessage, where: str, left: LeftOut, is_asked: bool) -> tuple[str, str]:
    """Return a message's text, and the reasoning that is among its parts. `is_asked`: as of `text_of`."""
    content = message.content
    if content is None:
        if message.role not in ("assistant", "tool"):  # a tool may return nothing
            raise InvalidRequest(f"{where} is required", where)
        return "", ""  # templates add text to it
    if isinstance(content, str) or message.role != "assistant":
        return text_of(content, _read_part, where, left, is_asked), ""
    thoughts = [_thinking(part, f"{where}[{i}]") for i, part in enumerate(content) if part.type == "thinking"]
    told = {i: part for i, part in enumerate(content) if part.type not in ("thinking", "redacted_thinking")}
    texts = [text_of([part], _read_part, where, left, is_asked, i) for i, part in told.items()]
    return "\n".join(texts), "\n".join(filter(None, thoughts))


def _read_part(part: TextPart, where: str) -> Reading:
    if part.type == "text":
        return required_text(part.text, where)
    if part.type == "refusal":
        return Reading(part.refusal)
    if part.type == "file" and isinstance(part.file, dict):
        return read_file(part.file.get("file_data"), part.file.get("filename"))
    if part.type in IMAGE_TYPES:
        return Reading(None, image=image_url(part.image_url))
    if part.type == VIDEO_TYPE:
        if part.fps is not None and not 0 < part.fps <= MAX_FPS:
            raise InvalidRequest(f"{where}.fps must be above 0 and at most {MAX_FPS:g}", f"{where}.fps")
        return Reading(None, video=image_url(part.video_url), fps=part.fps)
    return Reading(part.text)


def image_url(given: Unread) -> str | None:
    """Return the URL of an image; None if there is none."""
    if given is msgspec.UNSET:
        return None
    try:
        found = msgspec.json.decode(given, type=str | ImageAtURL | None)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return found.url if isinstance(found, ImageAtURL) else found


def _thinking(part: TextPart, where: str) -> str:
    if part.thinking is None:
        raise InvalidRequest(f"{where}.thinking is required", f"{where}.thinking")
    return part.thinking if isinstance(part.thinking, str) else "".join([each.text for each in part.thinking])


def _call_of_template(call: MessageToolCall, where: str) -> dict[str, Any]:
    """Return a call as the chat template takes it. Arguments become an object, because templates write the JSON
    themselves; arguments that are no JSON object stay text."""
    if call.type not in (None, "function"):
        raise InvalidRequest(f"{where}.tool_calls: only calls of type 'function' are supported", f"{where}.tool_calls")
    arguments: Any = call.function.arguments or "{}"
    if isinstance(arguments, str):
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
    allowed: list[dict[str, Any]] | None = None
    """Tools of which text can be a call; None: all that are offered."""

    @property
    def callable(self) -> list[dict[str, Any]] | None:
        return self.offered if self.allowed is None else self.allowed


def chosen_tools(body: ChatBody) -> ChosenTools:
    """Return the tools of the body that its `tool_choice` selects. Raise InvalidRequest if it names no tool of them."""
    tools, choice = offered_tools(body.tools), body.tool_choice
    if choice is None or choice == "auto":
        return ChosenTools(tools, _constrained(body.tools or (), tools or ()))
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
    if choice.type == "function":
        if choice.function is None:
            raise InvalidRequest("tool_choice.function is required", "tool_choice.function")
        named = {choice.function.name: "tool_choice"}
    else:
        if choice.allowed_tools is None:
            raise InvalidRequest("tool_choice.allowed_tools is required", "tool_choice.allowed_tools")
        each = enumerate(choice.allowed_tools.tools)
        named = {tool.function.name: f"tool_choice.allowed_tools.tools[{i}]" for i, tool in each}
    known = {tool["function"]["name"] for tool in tools}
    for name, where in named.items():
        if name not in known:
            raise InvalidRequest(f"{where}: {name[:80]!r} is none of tools", where)
    chosen = [tool for tool in tools if tool["function"]["name"] in named]
    if choice.allowed_tools is None or choice.allowed_tools.mode == "required":
        return ChosenTools(tools, chosen, True, chosen)
    given = [tool for tool in body.tools or () if tool.function.name in named]
    return ChosenTools(tools, _constrained(given, chosen, len(chosen) < len(tools)), allowed=chosen)


def _constrained(
    given: Sequence[Tool], callable_: Sequence[dict[str, Any]], is_part: bool = False
) -> list[dict[str, Any]]:
    """Return the tools that constrain calls if at least one of them is strict, or they are only a part of those in the
    prompt (`is_part`). A tool that is not strict accepts any object. Empty if calls are not constrained."""
    if not is_part and not any(tool.function.strict for tool in given):
        return []
    return [tool if own.function.strict else of_any_arguments(tool) for own, tool in zip(given, callable_, strict=True)]


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


def thinking_variables(wanted: bool | None, known: Collection[str], warnings: list[str]) -> dict[str, Any]:
    """Return `enable_thinking` as variables of a template that reads `known`; a warning if it has no such choice."""
    if wanted is None:
        return {}
    variables: dict[str, Any] = {name: wanted for name in THINKING_VARIABLES if name in known}
    if not variables:
        warnings.append("enable_thinking: the model's chat template has no such choice")
    return variables


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return `chat_template_kwargs` as the template takes them. Raise InvalidRequest for a name in `SET_OTHERWISE`."""
    for name in SET_OTHERWISE:
        if given and name in given:
            raise InvalidRequest(
                f"chat_template_kwargs.{name} is set by other fields; leave it out", f"chat_template_kwargs.{name}"
            )
    return given or {}
