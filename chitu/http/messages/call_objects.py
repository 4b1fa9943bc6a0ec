"""The JSON object of a tool call in a model's text, and the parts of a message that become of it. Pure.

Models imitate the tool list of their prompt and each other's formats, so the object may have `type`, may have both keys
within `function`, may have the arguments as a text that holds JSON, or may have none. They also write code into
strings: a raw line break there is no JSON, but means only one thing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from chitu.http.messages.python_literals import python_to_json

_FIELDS = ("reasoning", "content", "calls")
"""Fields of a message, in the order that it has unless the model wrote another."""
_OUTSIDE = re.compile(r"[\sA-Za-z0-9.+:,-]*")
_INSIDE = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_BRACKET = re.compile(r""""(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[()\[\]{}"']""", re.DOTALL)
"""A string, a bracket, or what begins a string that does not end."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
MAX_DEPTH = 512
"""Open brackets of an object whose missing ones are added."""
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments."""
NAMES = ("name", "function")
"""Keys under which they write the name of the tool."""
_KEYS = ("type", "id", *NAMES, *ARGUMENTS)
_STRING = re.compile(r"""\s*(?:(?P<q>["'])((?:(?!(?P=q))[^\\]|\\.)*)((?P=q)?))?""", re.DOTALL)
_UNQUOTED = {"type": re.compile(r"null"), "id": re.compile(r"null|\d+")}
"""Values that are no strings, under keys that name no tool."""
_PREFIX = re.compile(r"\A(?:functions?|tools?)[^A-Za-z0-9]*", re.IGNORECASE)
_SUFFIX = re.compile(r"(?::[^:]*|\d{1,9}|(?<![_-])(?:json|code|commentary|analysis|final|assistant)|[^A-Za-z0-9]+)\Z")
_NO_WORD = re.compile(r"[^a-z0-9]+")
_NO_ARGUMENTS = re.compile(r"(?:null|\[\s*\])?")
_COLON, _COMMA = re.compile(r"\s*(:?)"), re.compile(r"\s*(,?)")
_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|,(?=\s*[}\]])|\b(?:True|False|None)\b', re.DOTALL)
"""Strings, and what Python permits between them but JSON does not."""
_IN_STRING = re.compile(
    r"""(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u(?![dD][89a-fA-F])[\da-fA-F]{4}|\\["\\/bfnrt])|(\\u[dD][\da-fA-F]{3})|"""
    r"""\\?([\x00-\x1f])|\\(.)""",
    re.DOTALL,
)
"""A valid escape, half of a surrogate pair, a control character, or a character that needs no escape."""
_PYTHON = {"True": "true", "False": "false", "None": "null", ",": ""}


class CallDelta(NamedTuple):
    """A part of a tool call. The parts of one call concatenate."""

    place: int
    """Index of the call in its message."""
    arguments: str
    id: str = ""
    """Id of the call. It and `name` are set in the first part, and empty in all others."""
    name: str = ""


class MessageDelta(NamedTuple):
    """A part of a message, or a whole one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    order: tuple[tuple[str, int], ...] = ()
    """Runs in the order in which the model wrote them: the name of a field above, and how many of its characters or
    calls. Empty: reasoning, then content, then calls."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the runs in their order; reasoning as a message."""
        at = dict.fromkeys(_FIELDS, 0)
        for kind, size in self.order or ((kind, len(getattr(self, kind))) for kind in _FIELDS):
            begin = at[kind]
            at[kind] = end = begin + size
            if kind == "calls":
                yield from self.calls[begin:end]
            elif kind == "content":
                yield self.content[begin:end]
            else:
                yield MessageDelta(reasoning=self.reasoning[begin:end])


Piece = str | CallDelta | MessageDelta
"""What a parser emits; text is content."""


def joined(parts: Sequence[Piece]) -> str | MessageDelta:
    """Return all parts as one, in their order: as text (which is content) unless a part is more than text."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[CallDelta] = []
    order: list[tuple[str, int]] = []
    for piece in _pieces(parts):
        if isinstance(piece, CallDelta):
            if calls and calls[-1].place == piece.place:
                arguments[-1].append(piece.arguments)
                continue
            calls.append(piece)
            arguments.append([piece.arguments])
            kind, size = "calls", 1
        elif isinstance(piece, str):
            content.append(piece)
            kind, size = "content", len(piece)
        else:
            reasoning.append(piece.reasoning)
            kind, size = "reasoning", len(piece.reasoning)
        if order and order[-1][0] == kind:
            order[-1] = (kind, order[-1][1] + size)
        elif size:
            order.append((kind, size))
    whole = tuple([call._replace(arguments="".join(each)) for call, each in zip(calls, arguments, strict=True)])
    places = [_FIELDS.index(kind) for kind, _ in order]
    is_plain = all(place < later for place, later in itertools.pairwise(places))
    return MessageDelta("".join(content), "".join(reasoning), whole, () if is_plain else tuple(order))


def _pieces(parts: Sequence[Piece]) -> Iterator[Piece]:
    for part in parts:
        if isinstance(part, MessageDelta):
            yield from part.pieces()
        else:
            yield part


class Found(Enum):
    END = "end"
    MORE = "more"
    """The end is not in the text so far."""
    BROKEN = "broken"
    """The character at this position is not valid in JSON."""


class JSONEnd:
    """Follows brackets and strings, also Python's; text that it accepts may still be invalid JSON."""

    __slots__ = ("_depth", "_is_escaped", "_quote", "at")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        """What ends the string that is open."""
        self._is_escaped = False
        self.at = 0
        """Position in its text at which the last `feed` ended: after a bracket, at a broken character, or the end."""

    def feed(self, text: str) -> Found:
        """Read until a closing bracket or a string's end leaves no bracket open."""
        at, size = 0, len(text)
        while True:
            if self._is_escaped and at < size:
                self._is_escaped = False
                at += 1
            found = (_INSIDE[self._quote] if self._quote else _OUTSIDE).match(text, at)
            at = found.end() if found is not None else at
            if at >= size:
                self.at = size
                return Found.MORE
            character = text[at]
            at += 1
            if self._quote:
                self._is_escaped = character == "\\"
                self._quote = self._quote if self._is_escaped else ""
                if not self._quote and self._depth <= 0:
                    self.at = at
                    return Found.END
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    self.at = at
                    return Found.END
            else:
                self.at = at - 1
                return Found.BROKEN


def closed(text: str) -> tuple[str, str]:
    """Return an object with the brackets that it lacks, and what of the text is behind it."""
    parts: list[str] = []
    opened: list[str] = []
    done, end = 0, len(text)
    for found in _BRACKET.finditer(text):
        bracket = found[0]
        if bracket in _CLOSING:
            opened.append(_CLOSING[bracket])
        elif bracket in "'\"" or len(opened) > MAX_DEPTH:
            return text, ""
        elif len(bracket) == 1:
            if bracket not in opened:
                end = found.start()
                break
            while (missing := opened.pop()) != bracket:
                parts += text[done : found.start()], missing
                done = found.start()
    return "".join([*parts, text[done:end].rstrip(), *reversed(opened)]), text[end:]


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Checks the syntax of all JSON but decodes one level, so numbers have no bounds."""
_text = msgspec.json.Decoder(str)


class Call(NamedTuple):
    name: str
    arguments: str
    """JSON, an object; as the model wrote it if that was JSON."""


def call_of(text: str, names: Collection[str]) -> Call | None:
    """Return the call that an object is; None if it is none of a tool with one of `names`."""
    if text.startswith("{{") and text.endswith("}}"):  # Qwen's template shows the form of a call so
        text = text[1:-1]
    outer = _fields_of(mended(text))
    if outer is None:
        return None
    inner = outer.get("function", b"")
    function = _fields_of(bytes(inner).decode())
    given = outer if function is None else {**outer, **function}
    name = next((name for key in NAMES if (name := _text_of(given.get(key, b""))) is not None), None)
    if name is None or name not in names:
        return None
    found = next((value for key in ARGUMENTS if not _is_null(value := given.get(key, b"null"))), None)
    if found is not None:
        arguments = arguments_of(bytes(found).decode())
        return None if arguments is None else Call(name, arguments)
    # An object with other keys is an answer that has a name, too.
    return Call(name, "{}") if given.keys() <= set(_KEYS) else None


def arguments_of(text: str) -> str | None:
    """Return arguments as JSON; None if they are no object. Models write an object, or a text that holds one."""
    if text.startswith('"'):
        text = (_text_of(text.encode()) or "").strip()
    text = "{}" if _NO_ARGUMENTS.fullmatch(text) else mended(text)
    return None if _fields_of(text) is None else text


def mended(text: str) -> str:
    """Return an object as JSON, if it is JSON but for raw control characters and needless escapes in strings, trailing
    commas, or what Python writes otherwise; else as it is."""
    if _fields_of(text) is not None:
        return text
    better = _NOT_JSON.sub(_mended_part, text)
    if _fields_of(better) is None:
        better = _NOT_JSON.sub(_mended_part, python_to_json(text, False)) if "'" in text or "(" in text else ""
    return text if _fields_of(better) is None else better


def tool_of(label: str, names: Collection[str]) -> str:
    """Return the tool that a label plainly names, with what models write around it (`functions.f:0`, `f_1`, `fjson`);
    empty if it is none, or may be several."""
    if label in names:
        return label
    bare = without_namespace(label)
    labels = [label, bare]
    for each in (label, bare):
        while (shorter := _SUFFIX.sub("", each)) != each:
            labels.append(each := shorter)
    for each in labels:
        if each in names:
            return each
    for each in map(_plain, labels):
        found = [name for name in names if each and _plain(name) == each]
        if found:
            return found[0] if len(found) == 1 else ""
    return ""


def without_namespace(label: str) -> str:
    """Return the name of a tool without that of the namespace of all tools (`functions.f`)."""
    return _PREFIX.sub("", label, 1)


def fits(arguments: str, schema: Any) -> bool:
    """Return whether arguments have the keys that a tool's parameters require, and no others than they have."""
    given, known = _fields_of(arguments), schema if isinstance(schema, Mapping) else {}
    properties, required = known.get("properties") or {}, known.get("required") or ()
    return given is not None and set(required) <= given.keys() <= set(properties)


def _plain(name: str) -> str:
    return _NO_WORD.sub("_", name.lower()).strip("_")


def _mended_part(found: re.Match[str]) -> str:
    part = found[0]
    return _IN_STRING.sub(_escaped, part) if part.startswith('"') else _PYTHON[part]


def _escaped(found: re.Match[str]) -> str:
    valid, half, control, other = found.groups()
    if valid is not None:
        return str(valid)
    if half is not None:
        return "\\ufffd"
    if control is not None:
        return json.dumps(control)[1:-1]
    return str(other) if other == "'" else f"\\\\{other}"


def _fields_of(text: str) -> dict[str, msgspec.Raw] | None:
    try:
        return _fields.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _text_of(value: bytes | msgspec.Raw) -> str | None:
    try:
        return _text.decode(value)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _is_null(value: bytes | msgspec.Raw) -> bool:
    return bytes(value) == b"null"


def may_be_call(text: str, names: Collection[str]) -> bool | None:
    """Return whether an object that begins so, with its bracket, may be a call; None: more of the text will tell."""
    at = 1
    while True:
        key = _STRING.match(text, at)
        assert key is not None  # all parts of these patterns are optional
        if key[2] is None:
            return None if key.end() == len(text) else False
        if not key[3]:
            return None if any(known.startswith(key[2]) for known in _KEYS) else False
        if key[2] not in _KEYS:
            return False
        colon = _COLON.match(text, key.end())
        assert colon is not None
        if not colon[1]:
            return None if colon.end() == len(text) else False
        if key[2] in ARGUMENTS:
            return True
        value = _STRING.match(text, colon.end())
        assert value is not None
        at = value.end()
        if value[2] is None:
            if at == len(text):
                return None
            if key[2] == "function" and text[at] == "{":
                at += 1  # the name is in this object
                continue
            unquoted = _UNQUOTED[key[2]].match(text, at) if key[2] in _UNQUOTED else None
            if unquoted is None:
                return None if key[2] in _UNQUOTED and "null".startswith(text[at:]) else False
            at = unquoted.end()
        else:
            expected = {"type": ("function",), "id": None}.get(key[2], names)
            if expected is not None and value[3] and _text_of(f'"{value[2]}"'.encode()) not in expected:
                return False
            if expected is not None and not value[3]:
                begun = value[2].partition("\\")[0]  # what an escape means is known at the end
                if not any(known.startswith(begun) for known in expected):
                    return False
            if not value[3]:
                return None
            if key[2] in NAMES:
                return True
        comma = _COMMA.match(text, at)
        assert comma is not None
        if not comma[1]:
            return None if comma.end() == len(text) else False
        at = comma.end()


def json_text(text: str) -> str:
    return msgspec.json.encode(text).decode()
