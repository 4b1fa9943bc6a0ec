"""Parts of a message, and parsing of tool calls in a model's text: what all formats share. Pure; loop thread.

A call is emitted when its object is complete and valid. Text that is no call of an offered tool is content, as it was
written. So the parts of a stream are always the answer that is not streamed, and arguments are always a JSON object.
Only text that may be a call is held back, and no character is read more than a few times.

Models imitate the tool list of their prompt and each other's formats, so the object may have `type`, may have both keys
within `function`, may have the arguments as a text that holds JSON, or may have none. They also write code into
strings: a raw line break there is no JSON, but means only one thing.
"""

from __future__ import annotations

import abc
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple

import msgspec

from chitu.protocol import ToolFields
from chitu.tokenizer.stop import end_before_mark

_OUTSIDE = re.compile(r"[\sA-Za-z0-9.+:,-]*")
_INSIDE = re.compile(r'[^"\\]*')
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments."""
NAMES = ("name", "function")
"""Keys under which they write the name of the tool."""
_KEYS = ("type", "id", *NAMES, *ARGUMENTS)
_STRING = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)("?))?', re.DOTALL)
_UNQUOTED = {"type": re.compile(r"null"), "id": re.compile(r"null|\d+")}
"""Values that are no strings, under keys that name no tool."""
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
MAX_HEAD_CHARS = 512
"""Characters of a call up to its object, and of an object up to the name of its tool if no mark announces a call."""
PIECE_CHARS = 2048
"""Characters read at once; small, because each state copies what it leaves to the next one."""
FENCE = "```"
_OPENING = re.compile(r"\s*(?:```\w*\s*)?(?:\[\s*)?")
"""What may precede the object of a call: a code fence, and the bracket of an array of calls."""
_FENCE_BEGUN = re.compile(r"\s*`{1,2}\Z")


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


Piece = str | CallDelta | MessageDelta
"""What a parser emits; text is content."""


def joined(parts: Sequence[str | MessageDelta | CallDelta]) -> str | MessageDelta:
    """Return all parts as one: as text (which is content) unless a part is more than text."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "".join(texts)
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    calls: list[CallDelta] = []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
            continue
        if isinstance(part, MessageDelta):
            content.append(part.content)
            reasoning.append(part.reasoning)
        for call in part.calls if isinstance(part, MessageDelta) else (part,):
            if calls and calls[-1].place == call.place:
                arguments[-1].append(call.arguments)
            else:
                calls.append(call)
                arguments.append([call.arguments])
    whole = [call._replace(arguments="".join(pieces)) for call, pieces in zip(calls, arguments, strict=True)]
    return MessageDelta("".join(content), "".join(reasoning), tuple(whole))


class Found(Enum):
    END = "end"
    MORE = "more"
    """The end is not in the text so far."""
    BROKEN = "broken"
    """The character at this position is not valid in JSON."""


class JSONEnd:
    """Follows brackets and strings; text that it accepts may still be invalid JSON."""

    __slots__ = ("_depth", "_is_escaped", "_is_text", "at")

    def __init__(self, depth: int = 0) -> None:
        """`depth`: number of brackets that are already open."""
        self._depth = depth
        self._is_text = self._is_escaped = False
        self.at = 0
        """Position in its text at which the last `feed` ended: after a bracket, at a broken character, or the end."""

    def feed(self, text: str, down_to: int = 0) -> Found:
        """Read until a closing bracket or a string's end leaves at most `down_to` brackets open."""
        at, size = 0, len(text)
        while True:
            if self._is_escaped and at < size:
                self._is_escaped = False
                at += 1
            found = (_INSIDE if self._is_text else _OUTSIDE).match(text, at)
            at = found.end() if found is not None else at
            if at >= size:
                self.at = size
                return Found.MORE
            character = text[at]
            at += 1
            if self._is_text:
                self._is_escaped = character == "\\"
                self._is_text = self._is_escaped
                if not self._is_text and self._depth <= down_to:
                    self.at = at
                    return Found.END
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= down_to:
                    self.at = at
                    return Found.END
            else:
                self.at = at - 1
                return Found.BROKEN


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
    commas, or Python's constants; else as it is."""
    if _fields_of(text) is not None:
        return text
    better = _NOT_JSON.sub(_mended_part, text)
    return text if _fields_of(better) is None else better


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
        if key[1] is None:
            return None if key.end() == len(text) else False
        if not key[2]:
            return None if any(known.startswith(key[1]) for known in _KEYS) else False
        if key[1] not in _KEYS:
            return False
        colon = _COLON.match(text, key.end())
        assert colon is not None
        if not colon[1]:
            return None if colon.end() == len(text) else False
        if key[1] in ARGUMENTS:
            return True
        value = _STRING.match(text, colon.end())
        assert value is not None
        at = value.end()
        if value[1] is None:
            if at == len(text):
                return None
            if key[1] == "function" and text[at] == "{":
                at += 1  # the name is in this object
                continue
            unquoted = _UNQUOTED[key[1]].match(text, at) if key[1] in _UNQUOTED else None
            if unquoted is None:
                return None if key[1] in _UNQUOTED and "null".startswith(text[at:]) else False
            at = unquoted.end()
        else:
            expected = {"type": ("function",), "id": None}.get(key[1], names)
            if expected is not None and value[2] and _text_of(f'"{value[1]}"'.encode()) not in expected:
                return False
            if expected is not None and not value[2]:
                begun = value[1].partition("\\")[0]  # what an escape means is known at the end
                if not any(known.startswith(begun) for known in expected):
                    return False
            if not value[2]:
                return None
            if key[1] in NAMES:
                return True
        comma = _COMMA.match(text, at)
        assert comma is not None
        if not comma[1]:
            return None if comma.end() == len(text) else False
        at = comma.end()


def json_text(text: str) -> str:
    return msgspec.json.encode(text).decode()


class CallParser(abc.ABC):
    """Parser of one choice: `push` its text, then `finish`."""

    marks: ClassVar[tuple[str, ...]]
    """Marks that begin a call in free text."""
    hides_marks: ClassVar[bool] = False
    """Marks are no content, also where no call follows them."""
    needed: ClassVar[tuple[str, ...]] = ()
    """Texts without which calls are not found, and which may be special tokens."""
    trigger: ClassVar[str]
    """Text that every call from `written` begins with."""
    separator: ClassVar[str | None] = None
    """Text between calls; None: an answer that must be a call has only one."""
    end_mark: ClassVar[str] = ""
    """Text after the calls of a mark; may be empty."""
    is_leading: ClassVar[bool] = False
    """An answer may begin with a call without a mark."""
    fields: ClassVar[ToolFields | None] = None
    """How arguments are written; None: as a JSON object."""
    index_end: ClassVar[str] = ""
    """If not empty, a number follows what `written` returns first, and then this."""
    text_begin: ClassVar[str] = ""
    """What an answer that is text begins with, and no call does; empty: text and calls may be mixed."""
    has_section: ClassVar[bool] = False
    """One `trigger` begins all calls, and `end_mark` ends them. False: each call has its own."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools. Unless `is_parallel`, nothing is read after the first call. `is_enforced`: a
        grammar has calls follow schemas where they are as `written`, so without a mark only these are calls."""
        self.num_calls = 0
        self._names = names
        self._is_parallel = is_parallel
        self._is_enforced = is_enforced
        self._starts = frozenset(mark[0] for mark in self.marks)
        self._longest = max(map(len, self.marks))
        self._held = ""
        """Received text that waits for what follows it."""
        self._raw: list[str] = []
        """Text of the current call from its mark on: the mark, what precedes the object, and parts of the object."""
        self._name = ""
        """Name of the tool, if it precedes the object."""
        self._closers: tuple[str, ...] = ()
        """Texts that may follow the calls of a mark."""
        self._json = JSONEnd()
        self._pieces: list[Piece] = []
        self._trims = False
        """The next space is dropped."""
        self._has_mark = False
        """A mark announced the current call."""
        self._state: Callable[[str], str] = self._in_text
        if self.is_leading:
            self._begin("", "")

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, where the format of the calls has it, too (`harmony.py`)."""
        return False

    @property
    def is_complete(self) -> bool:
        """Whether the only call that is permitted is complete."""
        return self._state == self._behind_all

    def push(self, text: str) -> list[Piece]:
        """Return what can be emitted now: content and calls."""
        self._pieces = []
        for at in range(0, len(text), PIECE_CHARS):
            piece, self._held = self._held + text[at : at + PIECE_CHARS], ""
            while piece:
                piece = self._state(piece)
        return self._pieces

    def finish(self, is_whole: bool = True) -> list[Piece]:
        """Return the rest. No more text follows. Unless `is_whole`, the text was cut off."""
        self._pieces = []
        held, self._held = self._held, ""
        if self._raw or self._state == self._in_text:
            self._show("".join(self._raw) + held)
        return self._pieces

    @classmethod
    @abc.abstractmethod
    def written(cls, name: str) -> tuple[str, str]:
        """Return what the model writes before the arguments of a call, and what it writes after them."""

    def _make_id(self) -> str:
        return f"call_{os.urandom(12).hex()}"

    # ------------------------------------------- states: each takes text, which is not empty, and returns what is left

    def _in_text(self, text: str) -> str:
        found = [(at, -len(mark)) for mark in self.marks if (at := text.find(mark)) >= 0]
        if not found:
            end = end_before_mark(text, self.marks, self._starts, self._longest)
            self._show(text[:end])
            self._held = text[end:]
            return ""
        at, negative = min(found)
        end = at - negative
        self._show(text[:at])
        self._has_mark = True
        self._closers = (self.end_mark,) if self.end_mark else ()
        return self._begin("" if self.hides_marks else text[at:end], text[end:])

    def _begin(self, mark: str, text: str) -> str:
        self._raw, self._name = [mark], ""
        self._state = self._in_head
        return text

    def _in_head(self, text: str) -> str:
        """Read up to the object of a call."""
        found = _OPENING.match(text)
        assert found is not None  # all of it is optional
        at, opening = found.end(), found[0].strip()
        rest = text[at : at + MAX_HEAD_CHARS + 1]
        is_call: bool | None = False
        if at > MAX_HEAD_CHARS or (opening and self._is_enforced and not self._has_mark):
            pass
        elif not rest or _FENCE_BEGUN.match(text):
            is_call = None
        elif rest[0] == "{":
            is_call = self._has_mark or may_be_call(rest, self._names)
        if is_call is None and len(rest) <= MAX_HEAD_CHARS:
            self._held = text
            return ""
        if not is_call:
            return self._refuse(text)
        self._closers += tuple(closer for closer, opener in (("]", "["), (FENCE, FENCE)) if opener in opening)
        return self._read_object(text[:at], text[at:])

    def _read_object(self, before: str, text: str) -> str:
        self._raw.append(before)
        self._json = JSONEnd()
        self._state = self._in_object
        return text

    def _in_object(self, text: str) -> str:
        found, at = self._json.feed(text), self._json.at
        self._raw.append(text[:at])
        if found is Found.MORE:
            return ""
        call = self._call("".join(self._raw[2:])) if found is Found.END else None
        if call is None:
            return self._refuse(text[at:])
        self._emit(call)
        return text[at:]

    def _between(self, text: str) -> str:
        """Read what follows a call: the next one, or the end of its mark."""
        rest = text.lstrip()
        separator = rest[:1] if rest.startswith((",", ";")) else ""
        behind = rest[len(separator) :].lstrip()
        if self._closers and not separator and behind.startswith("}"):  # models close one object too many
            behind = behind[1:].lstrip()
        if len(rest) - len(behind) <= MAX_HEAD_CHARS:
            closer = next((closer for closer in self._closers if behind.startswith(closer)), None)
            if closer is not None:
                if closer == self.end_mark:
                    self._state = self._in_text
                return behind[len(closer) :]
            if behind.startswith("{"):
                return self._begin(rest[: len(rest) - len(behind)], behind)
            if not behind or any(closer.startswith(behind) for closer in self._closers):
                self._held = rest
                return ""
        self._state = self._in_text
        return rest

    def _behind_all(self, text: str) -> str:
        return ""

    # ------------------------------------------------------------------------------------------------------ their parts

    def _show(self, text: str) -> None:
        """Emit text as content, except space after a call."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if text:
            self._pieces.append(text)

    def _call(self, text: str) -> Call | None:
        """Return the call whose object was read; None if it is none of an offered tool."""
        if self._name:
            text = f'{{"name": {json_text(self._name)}, "arguments": {text}}}'
        return call_of(text, self._names)

    def _emit(self, call: Call) -> None:
        self._pieces.append(CallDelta(self.num_calls, call.arguments, self._make_id(), call.name))
        self.num_calls += 1
        self._raw = []
        self._trims = True
        self._state = self._between if self._is_parallel else self._behind_all

    def _refuse(self, rest: str) -> str:
        """Emit what was read as content, because it is no call. This includes the mark, so reading goes on with
        `rest`."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._in_text
        self._show(raw)
        return rest
