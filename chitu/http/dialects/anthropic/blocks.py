"""What blocks of Anthropic's Messages API say that are neither calls nor their results: text, documents, and what came
from tools of other servers. Pure; part of `BodyWork`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from chitu.http.ask.parts import Reading, read_file, required_text
from chitu.http.dialects.anthropic.bodies import MessagesBlock, MessagesPart

UNSEEN = ("fallback", "mcp_tool_listing", "tool_addition", "tool_removal")
"""Types of blocks that are not for the model: they leave the prompt without a placeholder."""


def read_part(part: MessagesPart | MessagesBlock, where: str) -> Reading:
    """Return the text of a part or block. Raise InvalidRequest for one of the type `text` without it."""
    if part.type == "text":
        return required_text(part.text, where)
    if part.type == "document":
        return _document(part)
    if part.type == "image":
        return Reading(None, image=_image(part))
    if part.type == "search_result":
        source = part.source if isinstance(part.source, str) else ""
        return Reading(_lines(part.title, source, *_texts(part.content)))
    if part.type == "tool_reference":
        return Reading(f"[tool {part.tool_name or ''}]", is_whole=False)
    if part.type == "compaction":
        has_failed = part.content is None and part.encrypted_content is msgspec.UNSET
        return Reading("" if has_failed else part.content if isinstance(part.content, str) else None)
    name = part.name or "" if isinstance(part, MessagesBlock) else ""
    if part.type == "mcp_tool_result" and (found := _lines(*_texts(part.content))):
        return Reading(f"[mcp_tool_result]\n{found}", is_whole=False)
    return Reading(part.text, name)


def _document(part: MessagesPart | MessagesBlock) -> Reading:
    source = part.source if isinstance(part.source, dict) else {}
    kind, data = source.get("type"), source.get("data")
    is_whole, found = True, None
    if kind == "text" and isinstance(data, str):
        found = data
    elif kind == "content":
        inner = source.get("content")
        found = _lines(*_texts(inner)) or None
        is_whole = isinstance(inner, str) or all(_is_text(each) for each in inner or ())
    elif kind == "base64":
        found = read_file(data, None, source.get("media_type")).text
    if found is None:
        return Reading(None, part.title or "")
    return Reading(_lines(part.title, part.context, found), part.title or "", is_whole)


def _image(part: MessagesPart | MessagesBlock) -> str | None:
    """Return the URL of an image; None if its file is elsewhere."""
    source = part.source if isinstance(part.source, dict) else {}
    data, url, kind = source.get("data"), source.get("url"), source.get("media_type")
    if source.get("type") == "base64" and isinstance(data, str):
        return f"data:{kind if isinstance(kind, str) else ''};base64,{data}"
    return url if source.get("type") == "url" and isinstance(url, str) else None


def _texts(content: str | Sequence[Any] | dict[str, Any] | None) -> list[str]:
    """Return the texts in content of any form."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _lines(*texts: str | None) -> str:
    return "\n".join([text for text in texts if text])
