"""What the text of a chat's choice is made into. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CallDelta(NamedTuple):
    """A part of a tool call; the parts of one concatenate."""

    place: int
    """Of the call in its message."""
    arguments: str
    id: str = ""
    """Of the first part, as the next; empty in all others."""
    name: str = ""


class MessageDelta(NamedTuple):
    """A part of a message, or a whole one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def joined(parts: Iterable[str | MessageDelta | CallDelta]) -> str | MessageDelta:
    """All of them as one: text (which is content) where none is more than that."""
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[CallDelta] = []
    is_text = True
    for part in parts:
        if isinstance(part, str):
            content.append(part)
            continue
        is_text = False
        if isinstance(part, MessageDelta):
            content.append(part.content)
            reasoning.append(part.reasoning)
        for call in part.calls if isinstance(part, MessageDelta) else (part,):
            if calls and calls[-1].place == call.place:
                arguments[-1].append(call.arguments)
            else:
                calls.append(call)
                arguments.append([call.arguments])
    text = "".join(content)
    if is_text:
        return text
    whole = [call._replace(arguments="".join(pieces)) for call, pieces in zip(calls, arguments, strict=True)]
    return MessageDelta(text, "".join(reasoning), tuple(whole))
