"""Calls in Python, `[f(a=1, b="x"), g()]`, as some templates of Llama 3.2 and 4 have them. Pure.

An answer is such a list or text; it may be between marks. Values are Python's or JSON's literals, which become JSON.
What is none, or has arguments without a name, is no call but content.
"""

from __future__ import annotations

import re
from typing import ClassVar

from chitu.http.messages.call_objects import Call, arguments_of
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser
from chitu.http.messages.python_literals import python_to_json
from chitu.protocol import ToolFields

_HEAD = re.compile(r"\s*(\[?)\s*([^\s\[(]+)\s*\(")
_HEAD_BEGUN = re.compile(r"\s*(\[?)\s*([^\s\[(]*)\s*\Z")
_OUTSIDE = re.compile(r"[^\"'()\[\]{}]*")
_INSIDE = {quote: re.compile(rf"[^\\{quote}]*") for quote in ("'", '"')}


class ArgumentsEnd:
    """Finds the bracket that closes those of a call."""

    __slots__ = ("_depth", "_is_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 1
        self._quote = ""
        """What ends the string that is open."""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Return the position after that bracket; -1: it is not in the text so far."""
        at, size = 0, len(text)
        while at < size:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            found = (_INSIDE[self._quote] if self._quote else _OUTSIDE).match(text, at)
            at = found.end() if found is not None else at
            if at >= size:
                break
            character = text[at]
            at += 1
            if self._quote:
                self._is_escaped = character == "\\"
                self._quote = self._quote if self._is_escaped else ""
            elif character in "'\"":
                self._quote = character
            else:
                self._depth += 1 if character in "([{" else -1
                if self._depth == 0:
                    return at
        return -1


class PythonicParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = "["
    separator: ClassVar[str | None] = ", "
    end_mark: ClassVar[str] = "]"
    has_section: ClassVar[bool] = True
    is_leading: ClassVar[bool] = True
    fields: ClassVar[ToolFields | None] = ToolFields("", "=", "", ", ")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"[{name}(", ")"

    def _begin(self, mark: str, text: str) -> str:
        self._end = ArgumentsEnd()
        self._is_first = not mark.startswith(",")
        return super()._begin(mark, text)

    def _in_head(self, text: str) -> str:
        head = text[: MAX_HEAD_CHARS + 1]
        found = _HEAD.match(head)
        if found is not None and bool(found[1]) is self._is_first and found[2] in self._names:
            self._name = found[2]
            self._raw.append(found[0])
            self._state = self._in_arguments
            return text[found.end() :]
        begun = _HEAD_BEGUN.match(head)
        if begun is not None and len(text) <= MAX_HEAD_CHARS:
            is_begun = any(name.startswith(begun[2]) for name in self._names)
            if is_begun and (bool(begun[1]) is self._is_first or not begun[2]):
                self._held = text
                return ""
        return self._refuse(text)

    def _in_arguments(self, text: str) -> str:
        at = self._end.feed(text)
        self._raw.append(text if at < 0 else text[:at])
        if at < 0:
            return ""
        arguments = arguments_of(f"{{{python_to_json(''.join(self._raw[2:])[:-1])}}}")
        if arguments is None:
            return self._refuse(text[at:])
        self._emit(Call(self._name, arguments))
        return text[at:]

    def _between(self, text: str) -> str:
        """Read what follows a call: the next one, or the end of the list."""
        rest = text.lstrip()
        if rest.startswith(","):
            return self._begin(rest[:1], rest[1:]) if rest[1:].strip() else self._hold(rest)
        if not rest:
            return self._hold(text)
        self._state = self._in_text
        return rest.removeprefix(self.end_mark)

    def _hold(self, text: str) -> str:
        self._held = text
        return ""
