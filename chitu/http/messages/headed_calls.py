"""Parsing of calls whose tool is named ahead of their arguments, several within the marks of a section or each in its
own: what `section_calls.py` and `tagged_calls.py` share. Pure.

A head is one regular expression, and another one tells whether a text may become it. What has none of an offered tool
is content without its marks.
"""

from __future__ import annotations

import abc
import re
from typing import ClassVar

from chitu.http.messages.call_objects import without_namespace
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser


class HeadedParser(CallParser):
    head: ClassVar[re.Pattern[str]]
    """What precedes the arguments; a group is what names the tool."""
    head_begins: ClassVar[str] = ""
    """Text that it begins with, after space."""
    head_begun: ClassVar[re.Pattern[str] | None] = None
    """All of a text that may become a head; None: what begins with `head_begins` may."""
    call_ends: ClassVar[tuple[str, ...]] = ()
    """Texts behind the arguments of a call that are no content."""

    @abc.abstractmethod
    def _behind_head(self, head: str, rest: str) -> str:
        """Read the arguments of a call of `self._name`: a state's work (`call_parser.py`)."""

    def _tool(self, label: str) -> str:
        """Return the name of the tool that a label names."""
        return label if label in self._names else without_namespace(label)

    def _in_head(self, text: str) -> str:
        head = text[: MAX_HEAD_CHARS + 1]
        found = self.head.match(head)
        if found is not None:
            self._name = self._tool(next(label for label in found.groups() if label is not None))
            if self._name in self._names:
                return self._behind_head(found[0], text[found.end() :])
            return self._refuse(text)
        if len(text) <= MAX_HEAD_CHARS and self._may_begin(head):
            self._held = text
            return ""
        return self._refuse(text)

    def _may_begin(self, text: str) -> bool:
        """Return whether a text may become a head."""
        if self.head_begun is not None:
            return self.head_begun.match(text) is not None
        begun = text.lstrip()
        return self.head_begins.startswith(begun) or begun.startswith(self.head_begins)

    def _between(self, text: str) -> str:
        """Read what follows a call: its end, and then the next one or the end of the mark."""
        rest = text.lstrip()
        if self.head_begins and rest.startswith(self.head_begins):
            return self._begin("", rest)
        end = next((mark for mark in self.call_ends if rest.startswith(mark)), None)
        if end is not None:
            return rest[len(end) :]
        if not rest.startswith(self.end_mark) and any(
            mark.startswith(rest) for mark in (self.head_begins, self.end_mark, *self.call_ends)
        ):
            self._held = rest
            return ""
        self._state = self._in_text
        return rest.removeprefix(self.end_mark)
