"""Parts of a message, into which the text of a chat's choice is parsed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CallDelta(NamedTuple):
    """A part of a tool call. The parts of one call concatenate."""

    place: int
    """Index of the call in its message."""
    arguments: str
    id: str = ""
    """Id of the call. It and `name` are set in the first part, and empty in all others."""
    name: str = ""


class MessageDelta(NamedTuple):
    """A part of a message, or a whole one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def joined(parts: Sequence[str | MessageDelta | CallDelta]) -> str | MessageDelta:
    """Return all parts as one: as text (which is content) unless a part is more than text."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[CallDelta] = []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
            continue
        if isinstance(part, MessageDelta):
            content.append(part.content)
            reasoning.append(part.reasoning)
        for call in part.calls if isinstance(part, MessageDelta) else (part,):
            if calls and calls[-1].place == call.place:
                arguments[-1].append(call.arguments)
            else:
                calls.append(call)
                arguments.append([call.arguments])
    whole = [call._replace(arguments="".join(pieces)) for call, pieces in zip(calls, arguments, strict=True)]
    return MessageDelta("".join(content), "".join(reasoning), tuple(whole))
