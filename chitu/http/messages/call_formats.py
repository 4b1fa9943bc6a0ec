"""The formats of tool calls that models write, and the grammars that enforce them. Pure.

* Hermes and Qwen: `{"name": ..., "arguments": {...}}` between `<tool_call>` and `</tool_call>`, one or several. Hermes
  2 Pro writes the arguments first. Other spellings of such a call are read, too (`loose_calls.py`).
* Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, or several of these separated by `;`, optionally
  after `<|python_tag|>`. Any other object is content, as soon as its keys tell. Llama 4 writes these objects, too,
  without a separator, behind `<|python_start|>`, content and `<|python_end|>`.
* Qwen3-Coder, GLM-4.5 and MiniMax-M2: tagged texts (`tagged_calls.py`).
* Llama 3.2 and 4 with a template that calls in Python: `[f(a=1), g()]` (`pythonic_calls.py`).
* Kimi-K2 and DeepSeek: a section of calls between marks (`section_calls.py`).
* Granite 3, Phi-4-mini, Command, Apertus and others: an array of objects between marks (`array_calls.py`).
* LFM2 and Gemma 3 with `tool_code`: calls in Python between marks (`code_calls.py`).
* Gemma 4: `call:f{a:1}` between marks (`gemma_calls.py`).
* DeepSeek-V3.2 and V4: DSML (`dsml_calls.py`). Seed-OSS: tagged texts (`seed_calls.py`).
* gpt-oss: a message on the channel `commentary` (`harmony.py`).
* Mistral: `[TOOL_CALLS]` and an array of `{"name": ..., "arguments": {...}}`, or for each call `[TOOL_CALLS]name{...}`,
  with `[CALL_ID]...` and `[ARGS]` after the name in some versions. All forms are read; an enforced call has the form
  that the model's template writes.

A grammar is of an answer that must be a call (`tool_choice`: `required`, or a function), or of calls that the model may
make if a tool is `strict`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.messages.call_objects import Call, Piece, json_text
from chitu.http.messages.call_parser import FENCE, MAX_HEAD_CHARS, CallParser
from chitu.http.messages.loose_calls import LOOSE_MARKS, LooseParser
from chitu.protocol import MAX_GRAMMAR_CHARS, Grammar, ToolCall, ToolCalls, ToolFields

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_MARK_BEGUN = "[TOOL"
_NAMED = re.compile(
    r"\s*([^\s\[{\"`]+)\s*(?:\[CALL_ID\][^\[{]*)?"
    r"(?:(?:\[ARGS\]\s*(?:null|None|\[\])?)?\s*(?=\[TOOL_CALLS\]|\Z)|"
    r"(?:\[ARGS\])?\s*(?=\{)|\[ARGS\]\s*(```\w*\s*)?(?=[{\"]))"
)
"""A name, and what precedes its arguments: an object, after `[ARGS]` also a text or a code fence; or no arguments."""
_NAME_BEGUN = re.compile(r"\s*[^\s\[{\"`]+\s*(?:\[[A-Z_]*(?:\][^\[{]*)?)*\Z")
_PLAIN_NAME = re.compile(r"[\w.-]+")


class HermesParser(LooseParser):
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>", *LOOSE_MARKS)
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    trigger: ClassVar[str] = "<tool_call>"
    hidden: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</tool_call>"

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'<tool_call>\n{{"name": {json_text(name)}, "arguments": ', "}\n</tool_call>"


class LlamaParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    trigger: ClassVar[str] = "{"
    separator: ClassVar[str | None] = "; "
    is_leading: ClassVar[bool] = True

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json_text(name)}, "parameters": ', "}"


class ArgumentsParser(LlamaParser):
    """The same with `arguments`, as templates for Gemma 3 have it."""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{{"name": {json_text(name)}, "arguments": ', "}"


class Llama4Parser(LlamaParser):
    """Llama 4: content between two marks, and the calls behind it; models also put a call between the marks."""

    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    needed: ClassVar[tuple[str, ...]] = marks
    separator: ClassVar[str | None] = ""
    end_mark: ClassVar[str] = marks[1]


class MistralParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = (MARK,)
    tags: ClassVar[tuple[str, ...]] = (ARGS, "[CALL_ID]")
    needed: ClassVar[tuple[str, ...]] = (MARK,)
    trigger: ClassVar[str] = MARK

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'{MARK} [{{"name": {json_text(name)}, "arguments": ', "}]"

    def finish(self, is_whole: bool = True) -> list[Piece]:
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

    def _behind_broken(self, text: str) -> str:
        read = "".join(self._raw[2:])
        if read.endswith(_MARK_BEGUN):  # up to its `_` a mark may be an array
            self._raw[2:] = [read.removesuffix(_MARK_BEGUN)]
            text = _MARK_BEGUN + text
        return super()._behind_broken(text)

    def _make_id(self) -> str:
        return os.urandom(5).hex()[:9]  # the templates accept only ids of 9 letters and digits


class NamedMistralParser(MistralParser):
    separator: ClassVar[str | None] = ""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return (f"{MARK}{name}{ARGS}", "") if _PLAIN_NAME.fullmatch(name) else super().written(name)


def text_of_calls(parser: type[CallParser], functions: Sequence[Mapping[str, Any]]) -> str:
    """Return calls of functions with `name` and `arguments` as a model of this format writes them."""
    written = []
    for i, function in enumerate(functions):
        begin, end = parser.written(function["name"])
        index_end = parser.behind_index(function["name"])
        begin += f"{i}{index_end}" if index_end else ""
        written.append(begin + _text_of_arguments(function["arguments"], parser.fields) + end)
    if not parser.has_section:
        return (parser.separator or "").join(written)
    begin = parser.trigger + parser.section_begin
    calls = (parser.separator or "").join([each.removeprefix(begin) for each in written])
    return f"{begin}{calls}{parser.section_end or parser.end_mark}"


def _text_of_arguments(given: Any, fields: ToolFields | None) -> str:
    if isinstance(given, str):
        return given
    if fields is None:
        return msgspec.json.encode(given).decode()

    def text_of(value: Any) -> str:
        if isinstance(value, str) and not fields.separator:
            return fields.middle + value
        return (fields.json_middle or fields.middle) + msgspec.json.encode(value).decode()

    return fields.separator.join([f"{fields.begin}{key}{text_of(value)}{fields.end}" for key, value in given.items()])


def grammar_of_calls(
    parser: type[CallParser],
    tools: Sequence[dict[str, Any]],
    params: Sequence[str],
    is_parallel: bool,
    is_required: bool,
    answer: Grammar | None = None,
) -> Grammar:
    """Return the grammar of calls of `tools` (as the chat template takes them) in the format that the parser reads.
    `params`: names of the fields of their parameters. `is_parallel` permits several calls if the format does. Unless
    `is_required`, calls are optional: in free text, or in place of an `answer` that follows a grammar. Raise
    InvalidRequest for parameters that are not an object, or too long a schema."""
    calls = []
    for tool, param in zip(tools, params, strict=True):
        function = tool["function"]
        schema = {"type": "object", **(function.get("parameters") or {})}
        if schema["type"] != "object":
            name = function["name"]
            param = f"{param}.type"
            raise InvalidRequest(f"{param} must be 'object', since calls of {name!r} are enforced", param)
        begin, end = parser.written(function["name"])
        index_end = parser.behind_index(function["name"])
        calls.append(ToolCall(begin, msgspec.Raw(msgspec.json.encode(schema)), end, parser.fields, index_end))
    are_alone = is_required or bool(parser.text_begin) or answer is not None
    several = is_parallel and (parser.separator is not None or not are_alone)
    is_leading = parser.is_leading and not is_required
    close = (parser.section_end or parser.end_mark) if parser.has_section else ""
    record = ToolCalls(
        *(tuple(calls), parser.trigger, is_required, several, parser.separator or "", is_leading, close),
        *(parser.text_begin, answer, parser.section_begin if parser.has_section else ""),
    )
    text = msgspec.json.encode(record).decode()
    if len(text) > MAX_GRAMMAR_CHARS:
        format_ = " with the format of the answer" if answer is not None else ""
        raise InvalidRequest(
            f"tools: {len(text)} characters of JSON{format_}; a call can be enforced of at most {MAX_GRAMMAR_CHARS}",
            "tools",
        )
    return Grammar("tool_calls", text)
