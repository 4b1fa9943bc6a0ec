"""Calls whose arguments are tagged texts instead of JSON, as Qwen3-Coder, GLM-4.5 and MiniMax-M2 write them. Pure.

A value is raw text. The tool's schema says whether it is a string or JSON, which the text alone does not tell. A value
may have anything in it, also the tags: it ends where its end tag and then another tag of the format follow, and a call
ends at the first end mark up to which all of it is one. What is no call of an offered tool is content.
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
from chitu.protocol import ToolFields

_one_value = msgspec.json.Decoder(list[msgspec.Raw])
"""Checks the syntax of all JSON, and decodes none of it."""
MAX_ENDS = 64
"""Texts in a call that look like its end and are not. A call with more is content."""
_MEMBER = '{"a":'


class TaggedParser(HeadedParser):
    argument: ClassVar[re.Pattern[str]]
    """A name and its value, with what follows them: all arguments of a call are such."""
    close: ClassVar[str]
    """Text that follows the arguments."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools, each with its parameters."""
        super().__init__(names, is_parallel, is_enforced)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._last = ""
        """The newest characters of the arguments, in which the end of the call may have begun."""
        self._num_ends = 0
        """Texts that looked like its end."""

    def _begin(self, mark: str, text: str) -> str:
        self._last, self._num_ends = "", 0
        return super()._begin(mark, text)

    def _behind_head(self, head: str, rest: str) -> str:
        self._raw.append(head)
        self._state = self._in_arguments
        return rest

    def _in_arguments(self, text: str) -> str:
        """Read up to the end of a call. All of it is read again only for a text that looks like its end."""
        self._raw.append(text)
        window, before = self._last + text, len(self._last)
        at = window.find(self.close)
        while at >= 0:
            whole = "".join(self._raw[2:])
            start = len(whole) - len(text) - before + at
            arguments = self._arguments(whole[:start])
            if arguments is not None:
                self._emit(Call(self._name, arguments))
                return whole[start + len(self.close) :]
            self._num_ends += 1
            if self._num_ends == MAX_ENDS:
                return self._refuse("")
            at = window.find(self.close, at + 1)
        self._last = window[-(len(self.close) - 1) :]
        return ""

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        if is_whole and self._state == self._in_arguments:  # the model left the end out
            arguments = self._arguments("".join(self._raw[2:]))
            if arguments is not None:
                self._held = ""
                self._emit(Call(self._name, arguments))
                return self._pieces
        return super().finish(is_whole)

    def _arguments(self, text: str) -> str | None:
        """Return the arguments as a JSON object; None if the text is not all of them."""
        values: dict[str, str] = {}
        at = len(text) - len(text.lstrip())
        while at < len(text):
            found = self.argument.match(text, at)
            if found is None or found.end() == at:
                return None
            values[found[1].strip()] = found[2]
            at = found.end()
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

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    trigger: ClassVar[str] = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</tool_call>"
    head_begins: ClassVar[str] = "<function="
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*<function=([^>\n]+)>\s*")
    argument: ClassVar[re.Pattern[str]] = re.compile(
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
    )
    close: ClassVar[str] = "</function>"
    fields: ClassVar[ToolFields] = ToolFields("<parameter=", ">\n", "\n</parameter>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"


class MiniMaxParser(TaggedParser):
    """MiniMax-M2: several `<invoke name="f">` within one mark."""

    marks: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "\n<minimax:tool_call>")
    needed: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "</minimax:tool_call>")
    trigger: ClassVar[str] = "<minimax:tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = "</minimax:tool_call>"
    head_begins: ClassVar[str] = "<invoke name="
    head: ClassVar[re.Pattern[str]] = re.compile(r'\s*<invoke name="?([^">\n]+)"?>\s*')
    argument: ClassVar[re.Pattern[str]] = re.compile(
        r'<parameter name="?([^">\n]+)"?>(.*?)</parameter>\s*(?=<parameter name=|\Z)', re.DOTALL
    )
    close: ClassVar[str] = "</invoke>"
    fields: ClassVar[ToolFields] = ToolFields('<parameter name="', '">', "</parameter>\n")

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f'<minimax:tool_call>\n<invoke name="{name}">\n', "</invoke>\n</minimax:tool_call>"


class GLMParser(TaggedParser):
    """GLM-4.5 and 4.6: the name, then `<arg_key>` and `<arg_value>` in turn."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "\n<tool_call>")
    needed: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    trigger: ClassVar[str] = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    end_mark: ClassVar[str] = ""
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*([^\s<]+)\s*(?=<)")
    argument: ClassVar[re.Pattern[str]] = re.compile(
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
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
