"""Turns with images as chat templates take them: content in parts, and images where the template has a place for them.
Pure; see `turns.py` and the marks of `images.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chitu.http.ask.images import MARK, MARKED, VIDEO, joined
from chitu.http.ask.turn_forms import Turn

ELSEWHERE = "[image: in the user's next turn]"
LEFT_OUT = "[image left out]"
IMAGE: dict[str, Any] = {"type": "image"}
VIDEO_PART: dict[str, Any] = {"type": "video"}


def in_parts(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with parts in the place of the content that has marks."""
    return [{**turn, "content": _parts(turn["content"])} if _has_mark(turn["content"]) else turn for turn in turns]


def numbers(turns: Sequence[Turn]) -> list[int]:
    """Return the numbers of the images, in the order of the turns."""
    return [
        int(found.removesuffix(VIDEO))
        for turn in turns
        for text in _texts(turn["content"])
        for found in MARKED.findall(text)
    ]


def in_words(text: str, word: Callable[[], str]) -> str:
    """Return a text with a word for each piece between its marks that says something."""
    pieces = MARKED.split(text)
    return "".join(
        [f"{MARK}{each}{MARK}" if i % 2 else word() if each.strip() else "" for i, each in enumerate(pieces)]
    )


def moved(turns: list[Turn]) -> list[Turn]:
    """Return the turns with the images of a tool's results in the user's turn behind them, or in one of their own."""
    found: list[Turn] = []
    waiting = ""
    for turn in turns:
        if waiting and turn["role"] != "tool":
            if turn["role"] == "user" and isinstance(turn["content"], str):
                turn = {**turn, "content": joined((waiting, turn["content"])) if turn["content"] else waiting}
            else:
                found.append({"role": "user", "content": waiting})
            waiting = ""
        if turn["role"] == "tool" and (marks := [each[0] for each in MARKED.finditer(turn["content"] or "")]):
            waiting += "".join(marks)
            turn = {**turn, "content": MARKED.sub(ELSEWHERE, turn["content"])}
        found.append(turn)
    return [*found, {"role": "user", "content": waiting}] if waiting else found


def left_out(turns: list[Turn]) -> list[Turn]:
    """Return the turns without the images of results."""
    return [
        {**turn, "content": MARKED.sub(LEFT_OUT, turn["content"])}
        if turn["role"] == "tool" and _has_mark(turn["content"])
        else turn
        for turn in turns
    ]


def of_results(turns: Sequence[Turn]) -> list[int]:
    """Return the numbers of the images in results of tools."""
    return numbers([turn for turn in turns if turn["role"] == "tool"])


def _texts(content: Any) -> list[str]:
    if isinstance(content, list):
        return [part["text"] for part in content if "text" in part]
    return [content] if isinstance(content, str) else []


def _has_mark(content: Any) -> bool:
    return any(MARKED.search(text) for text in _texts(content))


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return content, a text or text parts, as parts of text and images."""
    parts: list[dict[str, Any]] = []
    for text in _texts(content):
        for i, piece in enumerate(MARKED.split(text)):
            if i % 2:
                parts.append(dict(VIDEO_PART if piece.endswith(VIDEO) else IMAGE))
            elif piece:
                parts.append({"type": "text", "text": piece})
    return parts
