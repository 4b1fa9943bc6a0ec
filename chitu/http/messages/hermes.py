"""Tool calls of Hermes and Qwen: `{"name": ..., "arguments": {...}}` between `<tool_call>` and `</tool_call>`, one or
several. Hermes 2 Pro writes the arguments first. Pure."""

from __future__ import annotations

from typing import ClassVar

from chitu.http.messages.call_parser import CallParser, json_text


class HermesParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    trigger: ClassVar[str] = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</tool_call>"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json_text(name)}, "arguments": ', "}\n</tool_call>"
