"""A chat's body made of one of Anthropic's Messages API. Pure; part of `BodyWork`.

Blocks become what a chat has: `tool_use` the calls of an assistant's message, `tool_result` messages of the role
`tool`, `thinking` its reasoning, and all text and images of a turn its content. What else there is becomes a
placeholder, unless the last turn asks about it (`ask/parts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask.bodies import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    JsonSchemaFormat,
    MessageToolCall,
    ResponseFormat,
    Tool,
    ToolFunction,
)
from chitu.http.ask.chat import THINKING_VARIABLES
from chitu.http.ask.fields import TEXT_ONLY
from chitu.http.ask.images import SentImages, joined
from chitu.http.ask.parts import NOT_RUN, NOT_SHOWN, LeftOut, must_be_text, question_start, shown
from chitu.http.ask.translation import FieldNames, Translation, add_text, served_effort, turn_of, without_orphans
from chitu.http.dialects.anthropic.blocks import UNSEEN, read_part
from chitu.http.dialects.anthropic.bodies import (
    CHOICE_TYPES,
    THINKING_TYPES,
    AnthropicMessage,
    CountTokensBody,
    MessagesBlock,
    MessagesBody,
    MessagesPart,
    MessagesTool,
    MessagesToolChoice,
)

_NAMES = (
    (re.compile(r"messages(?=\[|\.|\Z).*"), "messages"),
    (re.compile(r"max_completion_tokens"), "max_tokens"),
    (re.compile(r"stop\Z"), "stop_sequences"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
)
_TOOL_FIELDS = (("parameters", "input_schema"),)
TOO_LONG = "prompt is too long: "
"""Agents that find these words in an error shorten their conversation."""
_ROLES = ("user", "assistant", "system")
_OWN_TYPES = {
    **dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant"),
    "tool_result": "user",
}
"""Types of blocks that only one role has."""


def chat_of_messages(
    body: CountTokensBody,
    variables: Collection[str],
    reasons: bool,
    warnings: list[str],
    images: SentImages | None = None,
) -> Translation:
    """Return the chat. `variables`: what its template reads; `reasons`: whether it knows of reasoning; `images`: see
    `chat_messages`. Raise InvalidRequest if the last turn asks about what is neither text nor an image; `warnings` gets
    a sentence about what has no effect, and about what the prompt leaves out."""
    left = LeftOut(images)
    messages, message_places = _turns(body, left)
    tools, places = _functions(body.tools or [], left)
    left.warn(warnings)
    kwargs = {**_thinking(body, variables, reasons, warnings), **(body.chat_template_kwargs or {})}
    thinking, config = body.thinking, body.output_config
    chat = ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        tools=tools,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use,
        chat_template_kwargs=kwargs or None,
        include_reasoning=thinking is None or thinking.display != "omitted",
    )
    if config is not None:
        chat.reasoning_effort = served_effort(config.effort, variables, "output_config.effort", warnings)
        if config.format is not None:
            if config.format.type != "json_schema":
                raise InvalidRequest("output_config.format.type must be json_schema", "output_config.format.type")
            chat.response_format = ResponseFormat("json_schema", JsonSchemaFormat(config.format.schema))
    if isinstance(body, MessagesBody):
        chat.max_completion_tokens = body.max_tokens
        chat.stop, chat.stream = body.stop_sequences or None, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.cache_salt = body.cache_salt
        chat.return_proof, chat.return_receipt = body.return_proof or body.return_token_ids, body.return_receipt
        chat.return_token_ids, chat.speculation = body.return_token_ids, body.speculation
    return Translation(chat, FieldNames(_NAMES, places, _TOOL_FIELDS, (), message_places, TOO_LONG), images=images)


def _functions(given: list[MessagesTool], left: LeftOut) -> tuple[list[Tool], list[str]]:
    """Return the tools of the chat, and the place of each among those given."""
    tools, places = [], []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            left.add(where, str(tool.type), NOT_RUN)
            continue
        if tool.name is None:
            raise InvalidRequest(f"{where}.name is required", f"{where}.name")
        tools.append(Tool("function", ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict)))
        places.append(where)
    return tools, places


def _choice(given: MessagesToolChoice | None) -> ChosenTool | str | None:
    if given is None:
        return None
    if given.type not in CHOICE_TYPES:
        raise InvalidRequest(f"tool_choice.type must be one of {', '.join(CHOICE_TYPES)}", "tool_choice.type")
    if given.type != "tool":
        return "required" if given.type == "any" else given.type
    if given.name is None:
        raise InvalidRequest("tool_choice.name is required with the type tool", "tool_choice.name")
    return ChosenTool("function", ChosenFunction(given.name))


def _thinking(body: CountTokensBody, known: Collection[str], reasons: bool, warnings: list[str]) -> dict[str, Any]:
    """Return `thinking` as variables of a template that reads `known`."""
    given = body.thinking
    if given is None:
        return {}
    if given.type not in THINKING_TYPES:
        raise InvalidRequest(f"thinking.type must be one of {', '.join(THINKING_TYPES)}", "thinking.type")
    if given.display not in (None, "summarized", "omitted"):
        raise InvalidRequest("thinking.display must be summarized or omitted", "thinking.display")
    wanted = given.type != "disabled"
    read = {name: wanted for name in THINKING_VARIABLES if name in known}
    if not read and wanted != reasons:
        always = "always reasons" if reasons else "does not reason"
        warnings.append(f"thinking: the model's chat template has no such choice; the model {always}")
    return read


# ------------------------------------------------------------------------------------------------------------ the turns


def _turns(body: CountTokensBody, left: LeftOut) -> tuple[list[ChatMessage], list[str]]:
    """Return the messages of the chat, and where each begins in this body."""
    if not body.messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    turns: list[ChatMessage] = []
    if body.system and (system := _text(body.system, "system", left.without_images)):
        turns.append(ChatMessage("system", system))
    places = ["system"] * len(turns)
    question = question_start([_role(message) for message in body.messages])
    for i, message in enumerate(body.messages):
        _add(turns, message, f"messages[{i}]", left, i >= question and message.role == "user")
        places += [f"messages[{i}]"] * (len(turns) - len(places))
    for turn in turns:
        if turn.content is None and not turn.tool_calls:
            turn.content = ""
    return without_orphans(turns), places


def _role(message: AnthropicMessage) -> str:
    """Return the role of a message, where one with results is a tool's."""
    blocks = message.content
    has_results = not isinstance(blocks, str) and any(block.type == "tool_result" for block in blocks)
    return "tool" if has_results else message.role


def _add(turns: list[ChatMessage], message: AnthropicMessage, where: str, left: LeftOut, is_asked: bool) -> None:
    """Add a message to the turns. Empty texts are left out. `is_asked`: it is the user's question."""
    role, content = message.role, message.content
    if role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be user, assistant or system, not {role[:40]!r}", f"{where}.role")
    blocks = [MessagesBlock("text", content)] if isinstance(content, str) else content
    num_turns = len(turns)
    for j, block in enumerate(blocks):
        here = f"{where}.content[{j}]"
        if _OWN_TYPES.get(block.type, role) != role:
            raise InvalidRequest(
                f"{here}.type: {block.type[:40]!r} is not supported of the role {role}", f"{here}.type"
            )
        if block.type in UNSEEN:
            left.add(here, block.type, NOT_SHOWN)
        elif block.type not in _OWN_TYPES:
            reading = read_part(block, here)
            if is_asked and must_be_text(block.type, reading, left):
                raise InvalidRequest(f"{here}.type: {block.type[:40]!r} is not supported ({TEXT_ONLY})", f"{here}.type")
            if text := shown(block.type, here, reading, left if role == "user" else left.without_images):
                add_text(turns, role, text)
        elif block.type == "tool_result":
            turns.append(_result(block, here, left))
        elif block.type == "tool_use":
            turn = turn_of(turns, role)
            turn.tool_calls = [*(turn.tool_calls or ()), _call(block, here)]
        elif block.thinking:
            turn = turn_of(turns, role)
            before = turn.reasoning_content
            turn.reasoning_content = f"{before}\n{block.thinking}" if before else block.thinking
    if len(turns) == num_turns and not (turns and turns[-1].role == role):
        turns.append(ChatMessage(role))


def _call(block: MessagesBlock, where: str) -> MessageToolCall:
    for name in ("id", "name"):
        if getattr(block, name) is None:
            raise InvalidRequest(f"{where}.{name} is required", f"{where}.{name}")
    assert block.name is not None
    arguments = "{}" if block.input is msgspec.UNSET else bytes(block.input).decode()
    return MessageToolCall(CalledFunction(block.name, arguments), block.id)


def _result(block: MessagesBlock, where: str, left: LeftOut) -> ChatMessage:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}.tool_use_id is required", f"{where}.tool_use_id")
    given = "" if block.content is None or isinstance(block.content, dict) else block.content
    text = _text(given, f"{where}.content", left)
    return ChatMessage("tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


def _text(given: str | list[MessagesPart], where: str, left: LeftOut) -> str:
    """Return the text of parts, without empty ones."""
    if isinstance(given, str):
        return given
    texts = [shown(part.type, f"{where}[{i}]", read_part(part, f"{where}[{i}]"), left) for i, part in enumerate(given)]
    return joined([text for text in texts if text])
