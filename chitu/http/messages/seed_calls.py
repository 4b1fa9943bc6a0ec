"""Calls of Seed-OSS: those of Qwen3-Coder between other marks, and values without lines of their own. Pure."""

from __future__ import annotations

import re
from typing import ClassVar

from chitu.http.messages.tagged_arguments import Tags
from chitu.http.messages.tagged_calls import QwenCoderParser
from chitu.protocol import ToolFields


class SeedParser(QwenCoderParser):
    marks: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "\n<seed:tool_call>", "<function=")
    hidden: ClassVar[tuple[str, ...]] = ("</seed:tool_call>",)
    needed: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "</seed:tool_call>"
    arguments: ClassVar[Tags | None] = Tags(
        re.compile(r"""<parameter(?:\s*=|\s+name=)\s*(?P<q>["']?)(?P<name>[^>\n"']+)(?P=q)\s*>"""),
        "</parameter>",
        ("parameter", "function", "seed:tool_call"),
    )
    fields: ClassVar[ToolFields] = ToolFields("<parameter=", ">", "</parameter>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>"
