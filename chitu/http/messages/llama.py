"""Tool calls of Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, or several of these separated by `;`,
optionally after `<|python_tag|>`. Any other object is content, at once. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser, json_text


class LlamaParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    trigger: ClassVar[str] = "{"
    is_leading: ClassVar[bool] = True
    separator: ClassVar[str | None] = "; "

    def __init__(self, names: Collection[str], is_streamed: bool, is_parallel: bool) -> None:
        super().__init__(names, is_streamed, is_parallel)
        self._state = self._at_start

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json_text(name)}, "parameters": ', "}"

    def _at_start(self, text: str) -> str:
        rest = text.lstrip()
        if not rest and len(text) <= MAX_HEAD_CHARS:
            self._raw, self._held = [""], text  # content, if nothing follows
            return ""
        self._raw = []
        self._state = self._in_text
        return self._begin(text[: len(text) - len(rest)], rest) if rest.startswith("{") else text

    def _between(self, text: str) -> str:
        rest = text.lstrip()
        if rest.startswith(";"):
            return self._begin(";", rest[1:])
        if rest.startswith("{"):
            return self._begin("", rest)
        if rest:
            self._state = self._in_text
        return rest
