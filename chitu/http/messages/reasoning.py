"""Parsing of the reasoning that some models write before their answer. Pure; loop thread."""

from __future__ import annotations

from typing import NamedTuple

from chitu.tokenizer.stop import end_before_mark

MAX_SPACE_CHARS = 64
"""The mark that opens the reasoning has fewer characters of space before it."""


class ReasoningMarks(NamedTuple):
    open: str
    close: str


MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


class ReasoningParser:
    """Splits a text into the reasoning between the marks at its beginning, and the rest. Drops the line ends at the
    marks, because templates write them again."""

    def __init__(self, marks: ReasoningMarks, is_open: bool) -> None:
        """`is_open`: the prompt ends within the reasoning."""
        self._open = marks.open
        self._closes = (marks.close, f"\n{marks.close}")
        self._starts = frozenset(mark[0] for mark in self._closes)
        self._held = ""
        self._state = self._inside if is_open else self._ahead
        self._trims = is_open
        """The next line ends are dropped."""

    @property
    def is_inside(self) -> bool:
        return self._state == self._inside

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._state == self._behind and not self._trims

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that can be emitted now."""
        text, self._held = self._held + text, ""
        return self._state(text) if text else ("", "")

    def finish(self) -> tuple[str, str]:
        """Return the rest. No more text follows."""
        held, self._held = self._held, ""
        return (held, "") if self._state == self._inside else ("", held)

    def _ahead(self, text: str) -> tuple[str, str]:
        rest = text.lstrip()
        has_room = len(text) - len(rest) < MAX_SPACE_CHARS
        if has_room and rest.startswith(self._open):
            self._state, self._trims = self._inside, True
            rest = rest[len(self._open) :]
            return self._inside(rest) if rest else ("", "")
        if has_room and self._open.startswith(rest):
            self._held = text
            return "", ""
        self._state = self._behind
        return "", text

    def _inside(self, text: str) -> tuple[str, str]:
        text = self._trimmed(text)
        found = [at for mark in self._closes if (at := text.find(mark)) >= 0]
        if not found:
            end = end_before_mark(text, self._closes, self._starts, len(self._closes[1]))
            self._held = text[end:]
            return text[:end], ""
        at = min(found)
        rest = text[at:].removeprefix("\n")[len(self._closes[0]) :]
        self._state, self._trims = self._behind, True
        return text[:at], self._trimmed(rest)

    def _behind(self, text: str) -> tuple[str, str]:
        return "", self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text
