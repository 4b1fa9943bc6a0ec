"""Calls in a section between marks, each between marks of its own, as Kimi-K2 and DeepSeek write them. Pure.

The name of the tool stands ahead of the arguments, which are a JSON object. Text in a section that is no call of an
offered tool is content, as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import ClassVar

from chitu.http.messages.call_objects import Call
from chitu.http.messages.call_parser import FENCE
from chitu.http.messages.headed_calls import HeadedParser

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MORE_ENDS = (FENCE, "}")
"""Models close one object too many."""
_CALL, _SEP, _CALL_END = map(re.escape, (DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END))


class SectionParser(HeadedParser):
    """A head ends where the arguments begin, or where the call does because there are none."""

    separator: ClassVar[str | None] = ""
    has_section: ClassVar[bool] = True

    def _behind_head(self, head: str, rest: str) -> str:
        if rest.startswith(("{", '"')):
            return self._read_object(head, rest)
        self._emit(Call(self._name, "{}"))
        return rest


class KimiParser(SectionParser):
    """Kimi-K2: a call has its id, `functions.f:0`, which its template writes again."""

    marks: ClassVar[tuple[str, ...]] = (KIMI_BEGIN,)
    needed: ClassVar[tuple[str, ...]] = (KIMI_BEGIN, KIMI_END, KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END)
    trigger: ClassVar[str] = KIMI_BEGIN
    end_mark: ClassVar[str] = KIMI_END
    index_end: ClassVar[str] = KIMI_ARGUMENTS
    head_begins: ClassVar[str] = KIMI_CALL
    call_ends: ClassVar[tuple[str, ...]] = (KIMI_CALL_END, *_MORE_ENDS)
    head: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{re.escape(KIMI_CALL)}\s*([^\s<]+)\s*{re.escape(KIMI_ARGUMENTS)}\s*(?=[{{\"]|{re.escape(KIMI_CALL_END)})"
    )

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        super().__init__(names, is_parallel, is_enforced)
        self._index = 0
        """Index in the id of the current call."""
        self._ids: set[str] = set()

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{KIMI_BEGIN}{KIMI_CALL}functions.{name}:", KIMI_CALL_END

    def _tool(self, label: str) -> str:
        name, _, index = label.rpartition(":")
        self._index = int(index) if name and index.isdecimal() and len(index) < 10 else self.num_calls
        return (name or label).removeprefix("functions.")

    def _make_id(self) -> str:
        while (made := f"functions.{self._name}:{self._index}") in self._ids:  # the model wrote an id twice
            self._index += 1
        self._ids.add(made)
        return made


class DeepSeekParser(SectionParser):
    """DeepSeek-V3.1 and later: the name, and the arguments. The form of V3 and R1 is read, too."""

    marks: ClassVar[tuple[str, ...]] = (DEEPSEEK_BEGIN,)
    needed: ClassVar[tuple[str, ...]] = (DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END)
    trigger: ClassVar[str] = DEEPSEEK_BEGIN
    end_mark: ClassVar[str] = DEEPSEEK_END
    head_begins: ClassVar[str] = DEEPSEEK_CALL
    call_ends: ClassVar[tuple[str, ...]] = (DEEPSEEK_CALL_END, *_MORE_ENDS)
    head: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{_CALL}\s*(?:function\s*{_SEP}\s*([^\s<`{{\"]+)|([^\s<]+)\s*{_SEP})\s*(?:```\w*\s*)?"
        rf"(?=[{{\"]|{_CALL_END})"
    )

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}{name}{DEEPSEEK_SEP}", DEEPSEEK_CALL_END


class FencedDeepSeekParser(DeepSeekParser):
    """DeepSeek-V3 and R1: `function`, the name, and the arguments in a code fence."""

    separator: ClassVar[str | None] = "\n"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        begin = f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{name}\n{FENCE}json\n"
        return begin, f"\n{FENCE}{DEEPSEEK_CALL_END}"
