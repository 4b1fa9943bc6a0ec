"""Where a JSON object ends in a text that comes in pieces. Pure; every character is looked at once."""

from __future__ import annotations

import re
from enum import Enum

_OUTSIDE = re.compile(r"[\sA-Za-z0-9.+:,-]*")
_INSIDE = re.compile(r'[^"\\]*')


class Found(Enum):
    END = "end"
    MORE = "more"
    """The end is not in the text so far."""
    BROKEN = "broken"
    """No JSON has the character that stands there."""


class JSONEnd:
    """Follows brackets and strings; what it lets pass may still be no JSON."""

    __slots__ = ("_depth", "_is_escaped", "_is_text", "at")

    def __init__(self, depth: int = 0) -> None:
        """`depth`: of brackets that are open already."""
        self._depth = depth
        self._is_text = self._is_escaped = False
        self.at = 0
        """Where the last `feed` ended in its text: behind the last bracket, at the broken character, or its end."""

    def feed(self, text: str, down_to: int = 0) -> Found:
        """Read on until a bracket is closed that leaves at most `down_to` of them open."""
        at, size = 0, len(text)
        while True:
            if self._is_escaped and at < size:
                self._is_escaped = False
                at += 1
            found = (_INSIDE if self._is_text else _OUTSIDE).match(text, at)
            at = found.end() if found is not None else at
            if at >= size:
                self.at = size
                return Found.MORE
            character = text[at]
            at += 1
            if self._is_text:
                self._is_escaped = character == "\\"
                self._is_text = self._is_escaped
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= down_to:
                    self.at = at
                    return Found.END
            else:
                self.at = at - 1
                return Found.BROKEN
