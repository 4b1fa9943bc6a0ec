"""The end of a JSON object or string in a text that arrives in pieces. Pure; every character is read once."""

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
    """The character at this position is not valid in JSON."""


class JSONEnd:
    """Follows brackets and strings; text that it accepts may still be invalid JSON."""

    __slots__ = ("_depth", "_is_escaped", "_is_text", "at")

    def __init__(self, depth: int = 0) -> None:
        """`depth`: number of brackets that are already open."""
        self._depth = depth
        self._is_text = self._is_escaped = False
        self.at = 0
        """Position in its text at which the last `feed` ended: after a bracket, at a broken character, or the end."""

    def feed(self, text: str, down_to: int = 0) -> Found:
        """Read until a closing bracket or a string's end leaves at most `down_to` brackets open."""
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
                if not self._is_text and self._depth <= down_to:
                    self.at = at
                    return Found.END
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
