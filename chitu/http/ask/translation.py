"""What bodies of other APIs than the chats' share on their way to a chat. Pure; part of `BodyWork`.

There is one generation loop, that of chats. A translation makes a chat's body of another body, and gives errors of the
chat the names of its own fields. What only the other API's own servers can run is left out of the prompt with a
warning: agents send such tools by default, and can do without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from chitu.errors import ContextLengthExceeded, InvalidRequest
from chitu.http.ask.bodies import EFFORTS, ChatBody, ChatMessage
from chitu.http.ask.images import SentImages, joined

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_TOOL = re.compile(r"tools\[(\d+)\]\.function")
_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking")


class FieldNames(NamedTuple):
    """Names of a chat's fields in another body."""

    patterns: tuple[tuple[re.Pattern[str], str], ...]
    """Fields of a chat -> the fields that they are made from. The first that matches applies."""
    tool_places: Sequence[str]
    """Place, in the other body, of each tool of the chat: `tools[2]`."""
    tool_fields: tuple[tuple[str, str], ...] = ()
    """Fields of a tool -> their own names."""
    custom_places: Collection[str] = ()
    """Places of those tools that have a format in the place of parameters."""
    message_places: Sequence[str] = ()
    """Place, in the other body, of what each message of the chat begins with."""
    too_long: str = ""
    """How the error of too long a prompt begins, if clients look for that."""

    def of(self, param: str) -> str:
        """Return the own name of a chat's field."""
        if found := _TOOL.match(param):
            field, place = param[found.end() :], self.tool_places[int(found[1])]
            if place in self.custom_places and field.startswith(".parameters"):
                field = ".format"
            for name, own in self.tool_fields:
                field = re.sub(rf"\A\.{name}\b", f".{own}", field)
            return f"{place}{field}"
        if (found := _MESSAGE.match(param)) and int(found[1]) < len(self.message_places):
            return self.message_places[int(found[1])]
        for pattern, name in self.patterns:
            if pattern.match(param):
                return pattern.sub(name, param)
        return param

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the chat with the own name of its field."""
        param, message = error.param, error.message
        if param is not None:
            own = self.of(param)
            message, param = message.replace(param, own), own
        if isinstance(error, ContextLengthExceeded):
            message = self.too_long + message
        return type(error)(message, param)


class Translation(NamedTuple):
    chat: ChatBody
    names: FieldNames
    enforced: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Parameters that calls of a tool follow in place of those that the prompt shows, by name."""
    images: SentImages | None = None
    """Images of the chat; None if the model has no vision."""


def served_effort(effort: str | None, known: Collection[str], param: str, warnings: list[str]) -> str | None:
    """Return the effort of reasoning. If the chat template, which reads `known`, has no such choice: None, with a
    warning, since agents send an effort whatever the model is."""
    if effort not in EFFORTS or effort == "none" or any(name in known for name in _EFFORT_VARIABLES):
        return effort
    warnings.append(f"{param}: the model's chat template has no such choice")
    return None


def turn_of(turns: list[ChatMessage], role: str) -> ChatMessage:
    """Return the last turn if it is of this role, else a new one after it."""
    if not turns or turns[-1].role != role:
        turns.append(ChatMessage(role))
    return turns[-1]


def add_text(turns: list[ChatMessage], role: str, text: str) -> None:
    """Add text to the last turn if it is of this role, else as a turn of its own. A line break joins texts, as it does
    the parts of a message. Chat templates take one system message, and many refuse two turns of one role."""
    turn = turn_of(turns, role)
    turn.content = joined((turn.content, text)) if isinstance(turn.content, str) and turn.content else text


def without_orphans(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with each result of a call that is not among those before it as text of the user: chat
    templates look for the call."""
    called: set[str | None] = set()
    kept = []
    for message in messages:
        called |= {call.id for call in message.tool_calls or ()}
        if message.role == "tool" and message.tool_call_id not in called:
            of = f" of {message.name}" if message.name else ""
            message = ChatMessage("user", f"[result of a call{of}]\n{message.content}")
        kept.append(message)
    return kept
