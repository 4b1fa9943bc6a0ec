"""Calls of Gemma 4 and FunctionGemma: `<|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>`. Pure.

Keys are bare, and strings are raw text between marks, so nothing in them is escaped, and no string has the mark in it.
JSON's strings and keys are read, too, and bare text that is no literal is a string, also with one of its two marks. The
tool's schema tells a bare `5` that is a string from a number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from chitu.grammars.tool_calls import types_of
from chitu.http.messages.call_objects import Call, Piece, arguments_of, json_text
from chitu.http.messages.headed_calls import HeadedParser
from chitu.http.messages.tagged_calls import value_of
from chitu.protocol import ToolFields

MAX_ENDS = 64
"""Texts in a call that look like its end and are not. A call with more is content."""
_SPACE = re.compile(r"\s*")
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*+)"(?=\s*(?:[,:}\]]|\Z))', re.DOTALL)
_BARE_KEY = re.compile(r"[^:{}\[\]]+")
_BARE_MEMBER = re.compile(r"[^{}\[\]]*?(?=\s*(?:[}\]]|\Z|,[^,:{}\[\]]+:))")
"""A value up to the end of its object, or the next key."""
_BARE_ITEM = re.compile(r"[^{}\[\],]*")
_PART_OF_MARK = re.compile(r'[<>|"]')
_LITERALS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


class GemmaParser(HeadedParser):
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call>", "call:")
    hidden: ClassVar[tuple[str, ...]] = ("<tool_call|>", "<|tool_response>", '<|"|>')
    needed: ClassVar[tuple[str, ...]] = (marks[0], *hidden)
    trigger: ClassVar[str] = marks[0]
    separator: ClassVar[str | None] = ""
    end_mark: ClassVar[str] = hidden[0]
    head_begins: ClassVar[str] = "call:"
    head: ClassVar[re.Pattern[str]] = re.compile(r"\s*(?:call:)*\s*([^\s{]+)\s*(?=\{)")
    head_begun: ClassVar[re.Pattern[str] | None] = re.compile(r"\s*(?:call:)*\s*[^\s{]*\s*\Z")
    fields: ClassVar[ToolFields | None] = ToolFields("", ":", "", ",")
    quote: ClassVar[str] = r'<\|"\|>'
    """Pattern of what is on both sides of a string, and never in one."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools, each with its parameters."""
        super().__init__(names, is_parallel, is_enforced)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._last = ""
        """The newest characters of the arguments, in which the end of the call may have begun."""
        self._num_ends = 0
        """Texts that looked like its end."""

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{cls.trigger}call:{name}{{", f"}}{cls.end_mark}"

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        while is_whole and self._state == self._in_arguments:  # the model left the end out
            rest = self._read("".join(self._raw[2:]))
            if rest is None:
                break
            while rest:
                rest = self._state(rest)
        return [*self._pieces, *super().finish(is_whole)]

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
        at = window.find(self.end_mark)
        while at >= 0:
            whole = "".join(self._raw[2:])
            end = len(whole) - len(text) - before + at
            rest = self._read(whole[:end])
            if rest is not None:
                return rest + whole[end:]
            self._num_ends += 1
            if self._num_ends == MAX_ENDS:
                return self._refuse("")
            at = window.find(self.end_mark, at + 1)
        self._last = window[-(len(self.end_mark) - 1) :]
        return ""

    def _read(self, text: str) -> str | None:
        """Emit the call whose arguments a text begins with and return what is behind them; None if there are none."""
        schema = self._schemas.get(self._name) or {}
        values = _Values(text, self.quote, schema)
        try:
            arguments = arguments_of(values.object(schema))
        except (ValueError, RecursionError):
            arguments = None
        if arguments is None:
            return None
        self._emit(Call(self._name, arguments))
        rest = text[values.at :]
        return rest if rest.strip("} \n") else ""  # models close one object too many


class FunctionGemmaParser(GemmaParser):
    marks: ClassVar[tuple[str, ...]] = ("<start_function_call>", "call:")
    hidden: ClassVar[tuple[str, ...]] = ("<end_function_call>", "<start_function_response>", "<escape>")
    needed: ClassVar[tuple[str, ...]] = (marks[0], *hidden)
    trigger: ClassVar[str] = marks[0]
    end_mark: ClassVar[str] = hidden[0]
    quote: ClassVar[str] = r"<escape>"


class _Values:
    """Reader of one call's arguments. Its methods read what is at `at`, a value as JSON, or raise ValueError."""

    def __init__(self, text: str, quote: str, root: Any) -> None:
        self.at = 0
        self._text = text
        self._root = root
        self._quote = re.compile(quote)
        self._quoted = re.compile(
            rf"{quote}(?:\s*{quote})*((?:(?!{quote}).)*){quote}(?:\s*{quote})*(?=\s*[,:}}\]])", re.DOTALL
        )

    def object(self, schema: Any) -> str:
        known = schema.get("properties") if isinstance(schema, Mapping) else None
        schemas = known if isinstance(known, Mapping) else {}
        members: dict[str, str] = {}
        for _ in self._items("{", "}"):
            key = self._key()
            self._expect(":")
            members[key] = self._value(schemas.get(key), _BARE_MEMBER)
        return f"{{{', '.join(f'{json_text(key)}: {value}' for key, value in members.items())}}}"

    def _array(self, schema: Any) -> str:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return f"[{', '.join([self._value(items, _BARE_ITEM) for _ in self._items('[', ']')])}]"

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        """Yield at each item between two brackets, and pass the commas between them."""
        self._expect(opening)
        while self._next() != closing:
            yield
            if self._next() == ",":
                self.at += 1
            elif self._next() != closing:
                raise ValueError(self.at)
        self.at += 1

    def _key(self) -> str:
        self._next()
        for pattern in (self._quoted, _JSON_STRING, _BARE_KEY):
            found = pattern.match(self._text, self.at)
            if found is not None:
                self.at = found.end()
                return self._quote.sub("", found[1] if pattern is not _BARE_KEY else found[0]).strip()
        raise ValueError(self.at)

    def _value(self, schema: Any, bare: re.Pattern[str]) -> str:
        begun = self._next()
        if begun == "{":
            return self.object(schema)
        if begun == "[":
            return self._array(schema)
        types = types_of(schema, self._root)
        found = self._quoted.match(self._text, self.at)
        if found is not None:
            self.at = found.end()
            is_text = not types or "string" in types
            return json_text(found[1]) if is_text else value_of(found[1], schema, self._root)
        found = _JSON_STRING.match(self._text, self.at)
        if found is not None:
            self.at = found.end()
            return found[0]
        found = bare.match(self._text, self.at)
        if found is None or not found[0]:
            raise ValueError(self.at)
        self.at = found.end()
        text = found[0].strip()
        if self._quote.search(text):  # one of two
            text = self._quote.sub("", text)
            if _PART_OF_MARK.search(text):
                raise ValueError(self.at)
            return json_text(text)
        if _PART_OF_MARK.search(text):
            raise ValueError(self.at)
        literal = _LITERALS.get(text, text if _NUMBER.fullmatch(text) else None)
        return json_text(text) if literal is None or (types == {"string"} and literal != "null") else literal

    def _next(self) -> str:
        """Pass space and return the next character; empty at the end."""
        found = _SPACE.match(self._text, self.at)
        self.at = found.end() if found is not None else self.at
        return self._text[self.at : self.at + 1]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise ValueError(self.at)
        self.at += 1
