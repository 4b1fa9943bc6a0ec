"""Calls whose arguments are tagged texts instead of JSON, as Qwen3-Coder, GLM-4.5 and MiniMax-M2 write them. Pure.

A value is raw text. The tool's schema says whether it is a string or JSON, which the text alone does not tell. A call
ends at the first end mark up to which all of it is one, exactly as the format has it (`tagged_arguments.py`). If there
is none until the answer ends, it is what it plainly means, up to its end mark or the next call. What is no call of an
offered tool is content without tags.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec

from chitu.grammars.tagged_fields import argument_schema
from chitu.grammars.tool_calls import is_raw_text, types_of
from chitu.http.messages.call_objects import Call, Piece, json_text, mended
from chitu.http.messages.headed_calls import HeadedParser
from chitu.http.messages.tagged_arguments import Tags
from chitu.protocol import ToolFields

_one_value = msgspec.json.Decoder(list[msgspec.Raw])
"""Checks the syntax of all JSON, and decodes none of it."""
MAX_ENDS = 256
"""Texts in a call that look like its end and are not. A call with more is content."""
MAX_TRIES = 16
"""Ends of one call that are tried once the answer is over."""
_MEMBER = '{"a":'
_TAGGED_HEAD = re.compile(
    r"""\s*(?:<\s*[\w:]+(?:\s*=|\s+name\s*=|\s)\s*)?["']?([^<>\s"'=]+)["']?\s*(?:>|(?=\n\s*<))\s*"""
)
_TAGGED_HEAD_BEGUN = re.compile(r"\s*(?:<[^<>\n]*|[^<>\n]*)\s*\Z")


class TaggedParser(HeadedParser):
    arguments: ClassVar[Tags | None] = None
    """Tags of the arguments. None: `_arguments` reads them."""
    close: ClassVar[str]
    """Text that follows the arguments."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools, each with its parameters."""
        super().__init__(names, is_parallel, is_enforced)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._end_marks = re.compile(
            "|".join(map(re.escape, filter(None, {self.close, self.end_mark, *map(str.strip, self.marks)})))
        )
        """What may end a call."""
        self._last = ""
        """The newest characters of the arguments, in which the end of the call may have begun."""
        self._num_ends = 0
        """Texts that looked like its end."""

    def _begin(self, mark: str, text: str) -> str:
        self._last, self._num_ends = "", 0
        super()._begin(mark, text)
        if mark == self.head_begins and self._is_enforced:
            return self._refuse(text)
        return text

    def _refuse(self, rest: str) -> str:
        is_tag_open = self._raw == [self.head_begins]
        super()._refuse(rest)
        if is_tag_open:
            self._state = self._in_tag
        return rest

    def _in_head(self, text: str) -> str:
        rest = text.lstrip()
        if rest.startswith("{") and self._raw[0].strip() == self.trigger:  # models write Hermes' calls, too
            return self._read_object(text[: -len(rest)], rest)
        return super()._in_head(text)

    def _behind_head(self, head: str, rest: str) -> str:
        self._raw.append(head)
        self._state = self._in_arguments
        return rest

    def _in_arguments(self, text: str) -> str:
        """Read up to the end of a call. All of it is read again only for a text that looks like its end."""
        self._raw.append(text)
        window, before = self._last + text, len(self._last)
        found = self._end_marks.search(window)
        while found is not None:
            whole = "".join(self._raw[2:])
            start = len(whole) - len(text) - before + found.start()
            if found[0] == self.head_begins and not whole[:start].strip():  # it is written twice
                return self._begin("", whole[start:])
            arguments = self._arguments(whole[:start])
            if arguments is not None:
                self._emit(Call(self._name, arguments))
                return whole[start + len(self.close) * (found[0] == self.close) :]
            self._num_ends += 1
            if self._num_ends == MAX_ENDS:
                self._raw[2:] = [whole[: start + len(found[0])]]
                return self._refuse(whole[start + len(found[0]) :])
            found = self._end_marks.search(window, found.start() + 1)
        self._last = window[-(max(map(len, (self.close, self.end_mark, *self.marks))) - 1) :]
        return ""

    def finish(self, is_whole: bool = True) -> list[Piece]:
        pieces: list[Piece] = []
        self._pieces = pieces
        for _ in range(MAX_TRIES):
            if self._state != self._in_arguments:
                break
            rest = self._meant("".join(self._raw[2:]), is_whole)
            while rest:
                rest = self._state(rest)
        return pieces + super().finish(is_whole)

    def _meant(self, text: str, is_whole: bool) -> str:
        """Emit the call that a text without its exact end begins with, or show it as content. Return what is behind
        it."""
        ends, last = [], len(text)
        for found in self._end_marks.finditer(text):
            ends.append(found.start())
            if found[0] not in (self.close, self.end_mark):  # the next call
                break
        else:
            ends += [last] * is_whole
        tags, parameters = self.arguments, self._schemas.get(self._name)
        known = parameters.get("properties") if isinstance(parameters, Mapping) else None
        closed = [end for end in ends if tags is not None and text[:end].rstrip().endswith(tags.closing)]
        for end in [*closed, *(ends if is_whole else ())][:MAX_TRIES]:
            arguments = self._arguments(text[:end])
            if arguments is None and tags is not None:
                pairs = tags.meant(text[:end], known if isinstance(known, Mapping) else ())
                arguments = self._written(dict(pairs)) if pairs is not None else None
            if arguments is not None:
                self._emit(Call(self._name, arguments))
                return text[end:].removeprefix(self.close)
        first = self._end_marks.search(text)
        if first is not None and first[0] in (self.close, self.end_mark):
            last = first.end()
        elif ends:
            last = ends[-1]
        self._raw[2:] = [text[:last]]
        return self._refuse(text[last:])

    def _between(self, text: str) -> str:
        rest = text.lstrip()
        end = next((mark for mark in (*self.call_ends, self.end_mark) if mark and rest.startswith(mark)), None)
        return super()._between(text) if end is None else rest[len(end) :]

    def _arguments(self, text: str) -> str | None:
        """Return the arguments as a JSON object; None if the text is not all of them."""
        pairs = self.arguments.exact(text) if self.arguments is not None else None
        return None if pairs is None else self._written(dict(pairs))

    def _written(self, values: Mapping[str, str]) -> str:
        """Return arguments as JSON."""
        parameters = self._schemas.get(self._name) or {}
        members = [
            f"{json_text(name)}: {value_of(text, argument_schema(name, parameters), parameters)}"
            for name, text in values.items()
        ]
        return f"{{{', '.join(members)}}}"


def value_of(text: str, schema: Any, root: Any) -> str:
    """Return a value as JSON. It is a string if its schema, within `root`, permits one, except `null` where that is
    permitted, too; or if it is no JSON."""
    bare = text.strip()
    if bare in ("null", "None") and "null" in types_of(schema, root):
        return "null"
    if is_raw_text(schema, root):
        return json_text(text)
    bare = mended(f"{_MEMBER}{bare}}}").removeprefix(_MEMBER)[:-1]
    try:
        is_json = len(_one_value.decode(f"[{bare}]")) == 1
    except (msgspec.MsgspecError, RecursionError, ValueError):
        is_json = False
    return bare if is_json else json_text(text)


class QwenCoderParser(TaggedParser):
    """Qwen3-Coder and later Qwens: `<function=f>`, and `<parameter=a>` with its value in lines of its own."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>", "<function=")
    hidden: ClassVar[tuple[str, ...]] = ("</tool_call>", "<parameter=")
    tags: ClassVar[tuple[str, ...]] = ("</function>", "<parameter=", "</parameter>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    trigger: ClassVar[str] = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</tool_call>"
    head_begins: ClassVar[str] = "<function="
    head: ClassVar[re.Pattern[str]] = _TAGGED_HEAD
    head_begun: ClassVar[re.Pattern[str] | None] = _TAGGED_HEAD_BEGUN
    call_ends: ClassVar[tuple[str, ...]] = ("</function>", "</parameter>")
    arguments: ClassVar[Tags | None] = Tags(
        re.compile(r"""<parameter(?:\s*=|\s+name=)\s*(?P<q>["']?)(?P<name>[^>\n"']+)(?P=q)\s*>\n?"""),
        "</parameter>",
        ("parameter", "function", "tool_call"),
        in_lines=True,
    )
    close: ClassVar[str] = "</function>"
    fields: ClassVar[ToolFields] = ToolFields("<parameter=", ">\n", "\n</parameter>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"


class MiniMaxParser(TaggedParser):
    """MiniMax-M2: several `<invoke name="f">` within one mark."""

    marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "\n<minimax:tool_call>", "<invoke name=")
    hidden: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>",)
    tags: ClassVar[tuple[str, ...]] = ("</invoke>", "<parameter name=", "</parameter>")
    needed: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "</minimax:tool_call>")
    trigger: ClassVar[str] = "<minimax:tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</minimax:tool_call>"
    head_begins: ClassVar[str] = "<invoke name="
    head: ClassVar[re.Pattern[str]] = _TAGGED_HEAD
    head_begun: ClassVar[re.Pattern[str] | None] = _TAGGED_HEAD_BEGUN
    call_ends: ClassVar[tuple[str, ...]] = ("</invoke>", "</parameter>")
    arguments: ClassVar[Tags | None] = Tags(
        re.compile(r"""<parameter(?:\s+name)?\s*=\s*(?P<q>["']?)(?P<name>[^>\n"']+)(?P=q)\s*>"""),
        "</parameter>",
        ("parameter", "invoke", "minimax:tool_call"),
    )
    close: ClassVar[str] = "</invoke>"
    fields: ClassVar[ToolFields] = ToolFields('<parameter name="', '">', "</parameter>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'<minimax:tool_call>\n<invoke name="{name}">\n', "</invoke>\n</minimax:tool_call>"


class GLMParser(TaggedParser):
    """GLM-4.5 and 4.6: the name, then `<arg_key>` and `<arg_value>` in turn."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>")
    hidden: ClassVar[tuple[str, ...]] = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    trigger: ClassVar[str] = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = ""
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*([^\s<]+)\s*(?=<|[^\s<]+\s*<)")
    head_begun: ClassVar[re.Pattern[str] | None] = re.compile(r"\s*[^\s<]*\s*[^\s<]*\s*\Z")
    arguments: ClassVar[Tags | None] = Tags(
        re.compile(r"<arg_key>(?P<name>[^<]*)</arg_key>\s*<arg_value>"),
        "</arg_value>",
        ("arg_key", "arg_value", "tool_call"),
        is_keyed=True,
    )
    close: ClassVar[str] = "</tool_call>"
    fields: ClassVar[ToolFields] = ToolFields("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"<tool_call>{name}\n", "</tool_call>"


class CompactGLMParser(GLMParser):
    """GLM-4.7 and later: the same without line ends."""

    separator: ClassVar[str | None] = ""
    fields: ClassVar[ToolFields] = ToolFields("<arg_key>", "</arg_key><arg_value>", "</arg_value>")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"<tool_call>{name}", "</tool_call>"
