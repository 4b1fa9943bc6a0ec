"""Calls in Python between marks: LFM2's `<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>`, and the fence `tool_code`
of templates for Gemma 3, with a call in each line. Pure.

LFM2's template writes strings without escapes. So all between the marks is read at once: as Python, or else so that a
quote is part of its string unless a comma, a colon or a bracket follows. LFM2 may be told to write JSON, which is read,
too. Around a call `print()` is of no matter. An answer may begin with a list of calls without marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from chitu.http.messages.call_objects import Call, Found, JSONEnd, Piece, arguments_of, call_of
from chitu.http.messages.call_parser import FENCE
from chitu.http.messages.python_literals import python_to_json
from chitu.http.messages.pythonic_calls import ArgumentsEnd, PythonicParser

MAX_ENDS = 64
"""Texts in a section that look like its end and are not. A section with more is content."""
_HEAD = re.compile(r"[\s,;]*(print\s*\(\s*)?([^\s(\[\]{},;]+)\s*\(")
_PRINTED = re.compile(r"\s*\)")
_REST = re.compile(r"[\s,;\]]*(?:<[^\s<>]*>?\s*)?")
"""What may be behind the calls: also an end mark that is not quite right."""
_RAW_STRING = re.compile(
    r"""(["'])((?:(?!\1)[^\\]|\\.|\1(?!\s*(?:[,:)\]}]|\Z)))*)\1(?=\s*(?:[,:)\]}]|\Z))""", re.DOTALL
)


class CodeParser(PythonicParser):
    hides_marks: ClassVar[bool] = False
    is_leading: ClassVar[bool] = False
    ending: ClassVar[str]
    """What ends the text of a mark."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        super().__init__(names, is_parallel, is_enforced)
        self._last = ""
        """The newest characters of a section, in which its end may have begun."""
        self._num_ends = 0
        """Texts that looked like its end."""
        if not is_enforced:
            self._begin("", "")

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        if is_whole and self._state == self._in_section and self._read("".join(self._raw[1:])):  # without its end
            self._held = ""
            return self._pieces
        return super().finish(is_whole)

    def _begin(self, mark: str, text: str) -> str:
        if mark not in self.marks:
            return super()._begin(mark, text)
        if mark == self.ending:
            self._state = self._in_text
            return text
        self._raw, self._last, self._num_ends = [mark], "", 0
        self._state = self._in_section
        return text

    def _in_section(self, text: str) -> str:
        """Read up to the end of a section. All of it is read again only for a text that looks like its end."""
        self._raw.append(text)
        window, before = self._last + text, len(self._last)
        at = window.find(self.ending)
        while at >= 0:
            whole = "".join(self._raw[1:])
            end = len(whole) - len(text) - before + at
            if self._read(whole[:end]):
                return whole[end + len(self.ending) :]
            self._num_ends += 1
            if self._num_ends == MAX_ENDS:
                return self._refuse("")
            at = window.find(self.ending, at + 1)
        self._last = window[-(len(self.ending) - 1) :]
        return ""

    def _read(self, text: str) -> bool:
        """Emit the calls that a section consists of. Return whether it does."""
        text = text.strip()
        while text.startswith(self.marks[0]):  # the model wrote it twice
            text = text[len(self.marks[0]) :].strip()
        calls = section_calls(text, self._names)
        for call in calls if self._is_parallel else calls[:1]:
            self._emit(call)
        if calls and self._is_parallel:
            self._state = self._in_text
        return bool(calls)


class LfmParser(CodeParser):
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>", "<|tool_call_end|>")
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = marks[0]
    ending: ClassVar[str] = marks[1]
    section_begin: ClassVar[str] = "["
    section_end: ClassVar[str] = f"]{marks[1]}"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{cls.trigger}[{name}(", ")"


class ToolCodeParser(CodeParser):
    """Gemma 3 with a template that asks for `tool_code`."""

    marks: ClassVar[tuple[str, ...]] = (f"{FENCE}tool_code", f"\n{FENCE}tool_code")
    needed: ClassVar[tuple[str, ...]] = ()
    trigger: ClassVar[str] = marks[0]
    ending: ClassVar[str] = FENCE
    separator: ClassVar[str | None] = "\n"
    section_begin: ClassVar[str] = "\n"
    section_end: ClassVar[str] = f"\n{FENCE}"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{cls.trigger}\n{name}(", ")"


def section_calls(text: str, names: Collection[str]) -> list[Call]:
    """Return the calls that a text consists of; none if there is anything else in it."""
    text = text.strip().removeprefix("[").lstrip()
    if text.startswith("{"):
        return _json_calls(text, names)
    return _python_calls(text, names) or _python_calls(_RAW_STRING.sub(_escaped, text), names)


def _python_calls(text: str, names: Collection[str]) -> list[Call]:
    calls: list[Call] = []
    at = 0
    while found := _HEAD.match(text, at):
        begin = found.end()
        size = ArgumentsEnd().feed(text[begin:])
        arguments = arguments_of(f"{{{python_to_json(text[begin : begin + size - 1])}}}") if size > 0 else None
        if arguments is None or found[2] not in names:
            return []
        calls.append(Call(found[2], arguments))
        at = begin + size
        if found[1] is not None:
            printed = _PRINTED.match(text, at)
            if printed is None:
                return []
            at = printed.end()
    return calls if _REST.fullmatch(text, at) else []


def _json_calls(text: str, names: Collection[str]) -> list[Call]:
    calls: list[Call] = []
    rest = text
    while rest:
        end = JSONEnd()
        call = call_of(rest[: end.at], names) if end.feed(rest) is Found.END else None
        if call is None:
            return []
        calls.append(call)
        rest = rest[end.at :].lstrip(" \n\t,;]")
    return calls


def _escaped(found: re.Match[str]) -> str:
    """Return a string with escapes ahead of the quotes in it."""
    quote, inner = found[1], found[2]
    return quote + re.sub(rf"\\.|{quote}", lambda part: part[0] if len(part[0]) > 1 else f"\\{quote}", inner) + quote
