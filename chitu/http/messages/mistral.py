"""Tool calls of Mistral: `[TOOL_CALLS]` and an array of `{"name": ..., "arguments": {...}}`, or for each call
`[TOOL_CALLS]name{...}`, with `[CALL_ID]...` and `[ARGS]` after the name in some versions. The parser reads all forms of
any version; an enforced call has the form that the model's template writes. Pure."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from chitu.http.messages.call_parser import CallHead, CallParser, HeadFound, json_text, object_head

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_NAMED = re.compile(r"\s*([^\s\[{\"]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME_BEGUN = re.compile(r"\s*(?:[^\s\[{\"]+\s*(?:\[[A-Z_]*(?:\][^\[{]*)?)*)?\Z")
_PLAIN_NAME = re.compile(r"[\w.-]+")
_ARRAY = re.compile(r"\s*\[\s*")


class MistralParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = (MARK,)

    needed: ClassVar[tuple[str, ...]] = (MARK,)

    trigger: ClassVar[str] = MARK

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{MARK} [{{"name": {json_text(name)}, "arguments": ', "}]"

    def _find_head(self, text: str) -> HeadFound:
        opened = _ARRAY.match(text)
        if opened is not None or text.lstrip().startswith("{"):
            start = opened.end() if opened is not None else 0
            head = object_head(text[start:])
            return head._replace(end=head.end + start) if isinstance(head, CallHead) else head
        named = _NAMED.match(text)
        if named is not None:
            return CallHead(named[1], named.end(), 0)
        return "more" if _NAME_BEGUN.match(text) else None

    def _between(self, text: str) -> str:
        rest = text.lstrip()
        if not rest:
            return ""
        if rest.startswith(","):
            return self._begin(",", rest[1:])
        self._state = self._in_text
        return rest.removeprefix("]") if self._head.depth else text

    def _make_id(self) -> str:
        return os.urandom(5).hex()[:9]  # the templates accept only ids of 9 letters and digits


class NamedMistralParser(MistralParser):
    separator: ClassVar[str | None] = ""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return (f"{MARK}{name}{ARGS}", "") if _PLAIN_NAME.fullmatch(name) else super().written(name)
