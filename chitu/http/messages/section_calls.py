"""Calls in a section between marks, each between marks of its own, as Kimi-K2 and DeepSeek write them. Pure.

The name of the tool stands ahead of the arguments, which are a JSON object. A call may lack any of its marks but one,
and have others instead. Text in a section that is no call of an offered tool is content without its marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import ClassVar

from chitu.http.messages.call_objects import Call, fits, tool_of
from chitu.http.messages.call_parser import FENCE
from chitu.http.messages.headed_calls import HeadedParser

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MORE_ENDS = (FENCE, "}")
"""Models close one object too many."""
_KIMI_MARKS = r"(?:<\|(?!tool_calls?_(?:section_)?end\|)\w+\|>\s*)"
_DEEPSEEK_MARKS = r"(?:<｜(?!tool▁calls?▁end｜)[^｜<>\s]+｜>\s*)"
"""Marks that end nothing, and space."""
_LABEL = r"[^\s<`{\"]"
_OBJECT = r"(?=[{\"]|%s)"
_INDEX = re.compile(r"(\d{1,9})\D*\Z")


class SectionParser(HeadedParser):
    """A head ends where the arguments begin, or where the call does because there are none."""

    separator: ClassVar[str | None] = ""
    has_section: ClassVar[bool] = True

    def _behind_head(self, head: str, rest: str) -> str:
        if rest.startswith(("{", '"')):
            return self._read_object(head, rest)
        self._raw.append(head)
        self._emit(Call(self._name, "{}"))
        return rest


class KimiParser(SectionParser):
    """Kimi-K2: a call has its id, `functions.f:0`, which its template writes again."""

    marks: ClassVar[tuple[str, ...]] = (KIMI_BEGIN, KIMI_CALL)
    hidden: ClassVar[tuple[str, ...]] = (KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_END)
    needed: ClassVar[tuple[str, ...]] = (*marks, *hidden)
    trigger: ClassVar[str] = KIMI_BEGIN
    end_mark: ClassVar[str] = KIMI_END
    index_end: ClassVar[str] = KIMI_ARGUMENTS
    head_begins: ClassVar[str] = KIMI_CALL
    call_ends: ClassVar[tuple[str, ...]] = (KIMI_CALL_END, *_MORE_ENDS)
    head: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{_KIMI_MARKS}*({_LABEL}+(?: {_LABEL}+)?)\s*{_KIMI_MARKS}*{_OBJECT % re.escape(KIMI_CALL_END)}"
    )
    head_begun: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{_KIMI_MARKS}*{_LABEL}*(?: {_LABEL}*)?\s*{_KIMI_MARKS}*(?:<(?:\|(?:\w+\|?)?)?)?\Z"
    )

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools, each with its parameters."""
        super().__init__(names, is_parallel, is_enforced)
        self._index = 0
        """Index in the id of the current call."""
        self._ids: set[str] = set()
        self._is_guess = False
        """The id of the current call names no tool, and only one is offered."""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{KIMI_BEGIN}{KIMI_CALL}functions.{name}:", KIMI_CALL_END

    def _tool(self, label: str) -> str:
        name = tool_of(label, self._names)
        self._is_guess = not name and len(self._names) == 1
        if self._is_guess:
            (name,) = self._names
        index = _INDEX.search(label.rpartition(name)[2]) if name and not self._is_guess else None
        self._index = int(index[1]) if index is not None else self.num_calls
        return name

    def _emit(self, call: Call) -> None:
        schemas = self._names
        if self._is_guess and not fits(call.arguments, schemas[call.name] if isinstance(schemas, Mapping) else None):
            self._refuse("")
        else:
            super()._emit(call)

    def _make_id(self) -> str:
        while (made := f"functions.{self._name}:{self._index}") in self._ids:  # the model wrote an id twice
            self._index += 1
        self._ids.add(made)
        return made


class DeepSeekParser(SectionParser):
    """DeepSeek-V3.1 and later: the name, and the arguments. The form of V3 and R1 is read, too."""

    marks: ClassVar[tuple[str, ...]] = (DEEPSEEK_BEGIN, DEEPSEEK_CALL)
    hidden: ClassVar[tuple[str, ...]] = (DEEPSEEK_SEP, DEEPSEEK_CALL_END, DEEPSEEK_END)
    needed: ClassVar[tuple[str, ...]] = (*marks, *hidden)
    trigger: ClassVar[str] = DEEPSEEK_BEGIN
    end_mark: ClassVar[str] = DEEPSEEK_END
    head_begins: ClassVar[str] = DEEPSEEK_CALL
    call_ends: ClassVar[tuple[str, ...]] = (DEEPSEEK_CALL_END, *_MORE_ENDS)
    head: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{_DEEPSEEK_MARKS}*(?:function\s*{_DEEPSEEK_MARKS}+({_LABEL}+)|({_LABEL}+))\s*{_DEEPSEEK_MARKS}*"
        rf"(?:```\w*\s*)?{_OBJECT % re.escape(DEEPSEEK_CALL_END)}"
    )
    head_begun: ClassVar[re.Pattern[str]] = re.compile(
        rf"\s*{_DEEPSEEK_MARKS}*{_LABEL}*\s*{_DEEPSEEK_MARKS}*{_LABEL}*\s*{_DEEPSEEK_MARKS}*"
        r"(?:`{1,2}|```\w*\s*)?(?:<(?:｜(?:[^｜<>\s]+｜?)?)?)?\Z"
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
