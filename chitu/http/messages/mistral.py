"""Tool calls of Mistral: `[TOOL_CALLS]` and an array of `{"name": ..., "arguments": {...}}`, or for each call
`[TOOL_CALLS]name{...}`, with `[CALL_ID]...` and `[ARGS]` after the name in some versions. The parser reads all forms of
any version; an enforced call has the form that the model's template writes. Pure."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from chitu.http.messages.call_parser import FENCE, MAX_HEAD_CHARS, CallParser, json_text
from chitu.http.messages.call_text import Call
from chitu.http.messages.delta import CallDelta

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_NAMED = re.compile(
    r"\s*([^\s\[{\"`]+)\s*(?:\[CALL_ID\][^\[{]*)?"
    r"(?:(?:\[ARGS\]\s*(?:null|None|\[\])?)?\s*(?=\[TOOL_CALLS\]|\Z)|"
    r"(?:\[ARGS\])?\s*(?=\{)|\[ARGS\]\s*(```\w*\s*)?(?=[{\"]))"
)
"""A name, and what precedes its arguments: an object, after `[ARGS]` also a text or a code fence; or no arguments."""
_NAME_BEGUN = re.compile(r"\s*[^\s\[{\"`]+\s*(?:\[[A-Z_]*(?:\][^\[{]*)?)*\Z")
_PLAIN_NAME = re.compile(r"[\w.-]+")


class MistralParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = (MARK,)
    needed: ClassVar[tuple[str, ...]] = (MARK,)
    trigger: ClassVar[str] = MARK

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{MARK} [{{"name": {json_text(name)}, "arguments": ', "}]"

    def finish(self, is_whole: bool = True) -> list[str | CallDelta]:
        named = _NAMED.match(self._held) if is_whole and self._state == self._in_head else None
        if named is None or named.end() < len(self._held) or named[1] not in self._names:
            return super().finish(is_whole)
        self._pieces, self._held = [], ""
        self._emit(Call(named[1], "{}"))
        return self._pieces

    def _in_head(self, text: str) -> str:
        head = text[: MAX_HEAD_CHARS + 1]
        named = _NAMED.match(head)
        if named is not None and named.end() < len(head):
            self._name = named[1]
            if self._name not in self._names:
                return self._refuse(text)
            before, rest = text[: named.end()], text[named.end() :]
            if rest.startswith(("{", '"')):
                self._closers += (FENCE,) if named[2] else ()
                return self._read_object(before, rest)
            self._emit(Call(self._name, "{}"))
            return rest
        if (named is not None or _NAME_BEGUN.match(head)) and len(text) <= MAX_HEAD_CHARS:
            self._held = text
            return ""
        return super()._in_head(text)

    def _make_id(self) -> str:
        return os.urandom(5).hex()[:9]  # the templates accept only ids of 9 letters and digits


class NamedMistralParser(MistralParser):
    separator: ClassVar[str | None] = ""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return (f"{MARK}{name}{ARGS}", "") if _PLAIN_NAME.fullmatch(name) else super().written(name)
