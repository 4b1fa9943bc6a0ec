"""Tool calls of Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, or several of these separated by `;`,
optionally after `<|python_tag|>`. Any other object is content, as soon as its keys tell. Pure."""

from __future__ import annotations

from typing import ClassVar

from chitu.http.messages.call_parser import CallParser, json_text


class LlamaParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    trigger: ClassVar[str] = "{"
    separator: ClassVar[str | None] = "; "
    is_leading: ClassVar[bool] = True

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json_text(name)}, "parameters": ', "}"
