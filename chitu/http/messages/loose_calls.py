"""Hermes' calls without its mark, as Qwen2.5-Coder writes them: an object between `<tools>` and `</tools>`, one in a
code fence, or one alone. Pure.

Such an object may be meant for a reader, too, or be one of the tools in the prompt. So it is a call only if it has a
name and arguments and nothing else, and without `<tools>` only where the answer begins or ends with it. While a grammar
has calls follow schemas, none of these is one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from chitu.http.messages.call_objects import Call, Piece, call_of, may_be_call, mended
from chitu.http.messages.call_parser import FENCE, MAX_HEAD_CHARS, CallParser

TOOLS, TOOLS_END = "<tools>", "</tools>"
LOOSE_MARKS = (TOOLS, f"\n{TOOLS}", FENCE, f"\n{FENCE}")
_KEYS = {"type", "id", "name", "arguments"}
_LABEL = re.compile(r"\w*\s*(?:\[\s*)?")
_SEPARATORS = " \r\n\t,;]"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class LooseParser(CallParser):
    """A format whose marks include `LOOSE_MARKS`."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        super().__init__(names, is_parallel, is_enforced)
        self._is_loose = True
        """The current call has no mark of the format."""
        self._fenced: list[Call] = []
        """Calls in fences, which are some if the answer ends behind them."""
        self._fence: list[str] = []
        """Text of these fences."""
        self._is_fenced = False
        if not is_enforced:
            self._begin("", "")

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        if is_whole and self._state in (self._behind_fenced, self._behind_fence):
            self._is_fenced, self._held = False, ""
            for call in self._fenced if self._is_parallel else self._fenced[:1]:
                self._emit(call)
            return self._pieces
        if self._state in (self._behind_fenced, self._behind_fence):
            self._keep(self._held)
            self._held = ""
        fence, self._fence, self._is_fenced = "".join(self._fence), [], False
        return [*([fence] if fence else ()), *super().finish(is_whole)]

    def _begin(self, mark: str, text: str) -> str:
        if mark in self.marks:
            self._is_loose = mark in LOOSE_MARKS
            if self._is_loose and self._is_enforced:
                self._show(mark)
                self._state = self._in_text
                return text
        super()._begin(mark, text)
        if mark.endswith(TOOLS):
            self._closers = (TOOLS_END,)
        elif mark.endswith(FENCE):
            self._is_fenced = True
            self._state = self._in_fence
        return text

    def _call(self, text: str) -> Call | None:
        return strict_call(text, self._names) if self._is_loose else super()._call(text)

    def _emit(self, call: Call) -> None:
        if not self._is_fenced:
            super()._emit(call)
            return
        self._fenced.append(call)
        self._keep("".join(self._raw))
        self._state = self._behind_fenced

    def _refuse(self, rest: str) -> str:
        self._raw = [*self._fence, *self._raw]
        self._is_fenced, self._fence, self._fenced = False, [], []
        return super()._refuse(rest)

    # ------------------------------------------- states: each takes text, which is not empty, and returns what is left

    def _in_fence(self, text: str) -> str:
        """Read up to the object of a call."""
        label = _LABEL.match(text)
        assert label is not None  # all of it is optional
        rest = text[label.end() : label.end() + MAX_HEAD_CHARS + 1]
        is_call = None if not rest else may_be_call(rest, self._names) if rest[0] == "{" else False
        if is_call is None and len(text) <= MAX_HEAD_CHARS:
            self._held = text
            return ""
        return self._read_object(text[: label.end()], text[label.end() :]) if is_call else self._refuse(text)

    def _behind_fenced(self, text: str) -> str:
        """Read what follows a call in a fence: the next one, or the end of the fence."""
        rest = text.lstrip(_SEPARATORS)
        if rest.startswith("{"):
            self._keep(text[: len(text) - len(rest)])
            self._raw = [""]
            return self._read_object("", rest)
        if rest.startswith(FENCE):
            self._keep(text[: len(text) - len(rest)] + FENCE)
            self._state = self._behind_fence
            return rest[len(FENCE) :]
        return self._hold_or_refuse(text, rest)

    def _behind_fence(self, text: str) -> str:
        """Read what follows a fence: the end of the answer, or the next fence."""
        rest = text.lstrip()
        if rest.startswith(FENCE):
            self._keep(text[: len(text) - len(rest)] + FENCE)
            self._raw = [""]
            self._state = self._in_fence
            return rest[len(FENCE) :]
        return self._hold_or_refuse(text, rest)

    def _hold_or_refuse(self, text: str, rest: str) -> str:
        if not FENCE.startswith(rest):
            return self._refuse(text)
        self._held = text
        return ""

    # ------------------------------------------------------------------------------------------------------ their parts

    def _keep(self, text: str) -> None:
        self._fence.append(text)
        self._raw = []


def strict_call(text: str, names: Collection[str]) -> Call | None:
    """Return the call that an object is if it has a name and arguments and nothing else."""
    try:
        given = _members.decode(mended(text))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return call_of(text, names) if {"name", "arguments"} <= given.keys() <= _KEYS else None
