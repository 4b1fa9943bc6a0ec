"""Calls as JSON objects in one array or section between marks, as Granite 3, Phi-4-mini, Command, Apertus and others
write them. Pure.

* Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`; some versions spell the mark `<tool_call>`.
* Granite 20B: `<function_call> {"name": ..., "arguments": {...}}` for each call.
* Phi-4-mini: `<|tool_call|>[...]<|/tool_call|>`, or `functools[...]` if the template asks for it.
* Nemotron Nano 2: `<TOOLCALL>[...]</TOOLCALL>`. Apriel, Hunyuan and Jamba: `<tool_calls>[...]</tool_calls>`.
  MiniMax-M1: the same without the array, an object in each line.
* Apertus: `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`.
* Command R7B and A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`.
  Text is between marks, too, which are no content. Command R: `Action:` and the array in a code fence.

An answer may begin with the array alone where the objects have a `name`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import msgspec

from chitu.http.messages.call_objects import Call, arguments_of, call_of, json_text, mended
from chitu.http.messages.call_parser import FENCE, CallParser

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ArrayParser(CallParser):
    separator: ClassVar[str | None] = ", "
    has_section: ClassVar[bool] = True
    section_begin: ClassVar[str] = "["
    may_be_bare: ClassVar[bool] = True
    """The model may leave the mark out at the beginning of an answer."""
    closers: ClassVar[Mapping[str, str]] = {}
    """For a mark that is no trigger: what ends its calls."""
    text_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around text, and ends without a call ahead of them: no content."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        super().__init__(names, is_parallel, is_enforced)
        if self.may_be_bare and not is_enforced:
            self._begin("", "")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}{cls.section_begin}{{"name": {json_text(name)}, "arguments": ', "}"

    def _begin(self, mark: str, text: str) -> str:
        if mark and (mark in self.text_marks or mark == self.end_mark):
            self._state = self._in_text
            return text
        if mark in self.closers:
            self._closers = (self.closers[mark],)
        return super()._begin(mark, text)


class GraniteParser(ArrayParser):
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>")
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = marks[0]
    section_end: ClassVar[str] = "]"
    closers: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}


class FunctionCallParser(ArrayParser):
    """Granite 20B: a mark for each call."""

    marks: ClassVar[tuple[str, ...]] = ("<function_call>",)
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = marks[0]
    separator: ClassVar[str | None] = " "
    has_section: ClassVar[bool] = False
    section_begin: ClassVar[str] = " "


class PhiParser(ArrayParser):
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "functools[", "<|/tool_call|>")
    needed: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "<|/tool_call|>"
    section_end: ClassVar[str] = "]<|/tool_call|>"
    closers: ClassVar[Mapping[str, str]] = {"functools[": "]"}


class FunctoolsParser(PhiParser):
    """Phi-4-mini with a template that asks for `functools`."""

    trigger: ClassVar[str] = "functools["
    section_begin: ClassVar[str] = ""
    section_end: ClassVar[str] = "]"


class NemotronParser(ArrayParser):
    marks: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "\n<TOOLCALL>", "</TOOLCALL>")
    needed: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "</TOOLCALL>")
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "</TOOLCALL>"
    section_end: ClassVar[str] = "]</TOOLCALL>"


class ToolCallsParser(ArrayParser):
    marks: ClassVar[tuple[str, ...]] = ("<tool_calls>", "\n<tool_calls>", "</tool_calls>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>")
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "</tool_calls>"
    section_end: ClassVar[str] = "]</tool_calls>"


class LinesParser(ToolCallsParser):
    """MiniMax-M1: an object in each line."""

    section_begin: ClassVar[str] = "\n"
    separator: ClassVar[str | None] = "\n"
    section_end: ClassVar[str] = "\n</tool_calls>"


class ApertusParser(ArrayParser):
    """The name of the tool is the key of its arguments."""

    marks: ClassVar[tuple[str, ...]] = ("<|tools_prefix|>", "<|tools_suffix|>")
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "<|tools_suffix|>"
    section_end: ClassVar[str] = "]<|tools_suffix|>"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{cls.trigger}[{{{json_text(name)}: ", "}"

    def _call(self, text: str) -> Call | None:
        given = members_of(text)
        if given is not None and len(given) == 1:
            [(name, value)] = given.items()
            arguments = arguments_of(bytes(value).decode()) if name in self._names else None
            if arguments is not None:
                return Call(name, arguments)
        return super()._call(text)


class ActionParser(ArrayParser):
    """Command R: `Action:`, and a code fence."""

    marks: ClassVar[tuple[str, ...]] = ("Action:", "\nAction:")
    trigger: ClassVar[str] = f"Action:\n{FENCE}json"
    section_begin: ClassVar[str] = "\n[\n    "
    separator: ClassVar[str | None] = ",\n    "
    section_end: ClassVar[str] = f"\n]{FENCE}"
    may_be_bare: ClassVar[bool] = False

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}{cls.section_begin}{{"tool_name": {json_text(name)}, "parameters": ', "}"

    def _call(self, text: str) -> Call | None:
        given = members_of(text)
        if given is None or "tool_name" not in given:
            return super()._call(text)
        others = {key: value for key, value in given.items() if key not in ("tool_name", "tool_call_id")}
        return call_of(msgspec.json.encode({"name": given["tool_name"], **others}).decode(), self._names)


class CommandParser(ActionParser):
    """Command R7B and A."""

    text_marks: ClassVar[tuple[str, ...]] = (
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *("<|START_TEXT|>", "<|END_TEXT|>"),
    )
    marks: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>", "<|END_ACTION|>", *text_marks)
    needed: ClassVar[tuple[str, ...]] = marks
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = "<|END_ACTION|>"
    section_begin: ClassVar[str] = "[\n    "
    section_end: ClassVar[str] = "\n]<|END_ACTION|>"
    text_begin: ClassVar[str] = text_marks[0]
    marks_text: ClassVar[bool] = True

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{cls.trigger}{cls.section_begin}{{"tool_call_id": "', "}"

    @classmethod
    def behind_index(cls, name: str) -> str:
        return f'", "tool_name": {json_text(name)}, "parameters": '


class CommandTextParser(CommandParser):
    """Later Commands, whose text is between other marks."""

    text_begin: ClassVar[str] = "<|START_TEXT|>"


def members_of(text: str) -> dict[str, msgspec.Raw] | None:
    """Return the members of a JSON object; None if the text is none."""
    try:
        return _members.decode(mended(text))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
