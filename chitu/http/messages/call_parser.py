"""Parsing of tool calls in a model's text: what all formats share. Pure; loop thread.

A call is a JSON object with the tool's name and its arguments. In a stream, the name is emitted as soon as the head of
the object is complete, and the arguments as they arrive. In an answer that is not streamed, and if an object has its
keys in another order, a call is emitted when it is complete. Text that is no call of an offered tool is content, as it
was written. Only text that may begin a call is held back, and no character is read more than a few times.
"""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from chitu.http.messages.delta import CallDelta
from chitu.http.messages.json_end import Found, JSONEnd
from chitu.tokenizer.stop import end_before_mark

MAX_HEAD_CHARS = 512
"""Characters of a call up to its arguments."""
PIECE_CHARS = 2048
"""Characters read at once; small, because each state copies what it leaves to the next one."""
ARGUMENTS = ("arguments", "parameters")
"""Keys under which models write the arguments."""
_MORE: Literal["more"] = "more"
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE = re.compile(r"\s*")
_KEYS = tuple(f'"{name}"' for name in ARGUMENTS)
_HEAD: tuple[tuple[str, ...], ...] = (("{",), ('"name"',), (":",), (), (",",), _KEYS, (":",), ("{",))
"""Parts of a head in their order: one text of each group; the empty group stands for the name."""
_decode = msgspec.json.Decoder().decode


class CallHead(NamedTuple):
    name: str
    end: int
    """Position where the object of the arguments begins."""
    depth: int
    """Number of brackets that are open there."""


HeadFound = CallHead | Literal["more"] | None
"""`more`: the text may become a head. None: it is not a head."""


def object_head(text: str) -> HeadFound:
    """Find the head `{"name": "f", "arguments": {`, with any space between its parts."""
    at, name = 0, ""
    for group in _HEAD:
        space = _SPACE.match(text, at)
        at = space.end() if space is not None else at
        rest = text[at:]
        if not rest:
            return _MORE
        if not group:
            found = _NAME.match(text, at)
            if found is None:
                return _MORE if rest[0] == '"' else None
            try:
                name = _decode(found[0])
            except msgspec.DecodeError:
                return None
            at = found.end()
            continue
        whole = next((word for word in group if rest.startswith(word)), None)
        if whole is None:
            return _MORE if any(word.startswith(rest) for word in group) else None
        at += len(whole)
    return CallHead(name, at - 1, 1)


def json_text(text: str) -> str:
    return msgspec.json.encode(text).decode()


class CallParser(abc.ABC):
    """Parser of one choice: `push` its text, then `finish`."""

    marks: ClassVar[tuple[str, ...]]
    """Marks that begin a call in free text."""
    needed: ClassVar[tuple[str, ...]] = ()
    """Texts without which calls are not found, and which may be special tokens."""
    trigger: ClassVar[str]
    """Text that every call from `written` begins with."""
    separator: ClassVar[str | None] = None
    """Text between calls; None: an answer that must be a call has only one."""
    end_mark: ClassVar[str] = ""
    """Text after each call; may be empty."""
    is_leading: ClassVar[bool] = False
    """Calls are at the beginning of an answer or nowhere."""
    takes_any_order: ClassVar[bool] = False
    """The object of a call may begin with another key than the name."""

    def __init__(self, names: Collection[str], is_streamed: bool, is_parallel: bool) -> None:
        """`names`: names of the tools. Unless `is_parallel`, nothing is read after the first call."""
        self.num_calls = 0
        self._names = names
        self._is_streamed = is_streamed
        self._is_parallel = is_parallel
        self._starts = frozenset(mark[0] for mark in self.marks)
        self._longest = max(map(len, self.marks))
        self._held = ""
        """Received text that waits for what follows it."""
        self._raw: list[str] = []
        """Text of the current call from its mark on, while nothing of the call has been emitted."""
        self._arguments: list[str] = []
        """Arguments of the current call, while nothing of the call has been emitted."""
        self._head = CallHead("", 0, 0)
        self._json = JSONEnd()
        self._pieces: list[str | CallDelta] = []
        self._trims = False
        """The next space is dropped."""
        self._state: Callable[[str], str] = self._in_text

    @property
    def is_complete(self) -> bool:
        """Whether the only call that is permitted is complete."""
        return self._state == self._behind_all

    def push(self, text: str) -> list[str | CallDelta]:
        """Return what can be emitted now: content and parts of calls."""
        self._pieces = []
        for at in range(0, len(text), PIECE_CHARS):
            piece, self._held = self._held + text[at : at + PIECE_CHARS], ""
            while piece:
                piece = self._state(piece)
        return self._pieces

    def finish(self) -> list[str | CallDelta]:
        """Return the rest. No more text follows."""
        self._pieces = []
        held, self._held = self._held, ""
        if self._raw or self._state == self._in_text:
            self._show("".join(self._raw) + held)
        elif self._state == self._in_broken:
            self._argue(held)
        return self._pieces

    @abc.abstractmethod
    def _between(self, text: str) -> str:
        """Read text after a call. A state, as below."""

    @classmethod
    @abc.abstractmethod
    def written(cls, name: str) -> tuple[str, str]:
        """Return what the model writes before the arguments of a call, and what it writes after them."""

    def _find_head(self, text: str) -> HeadFound:
        return object_head(text)

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
        return self._begin(text[at:end], text[end:])

    def _begin(self, mark: str, text: str) -> str:
        self._raw = [mark]
        self._arguments = []
        self._state = self._in_head
        return text

    def _in_head(self, text: str) -> str:
        head = self._find_head(text[: MAX_HEAD_CHARS + 1])
        if head == _MORE and len(text) <= MAX_HEAD_CHARS:
            self._held = text
            return ""
        if isinstance(head, CallHead) and head.name in self._names:
            self._head, self._json = head, JSONEnd(head.depth)
            self._state = self._in_arguments
            if self._is_streamed:
                self._raw = []
                self._open(head.name, "")
            else:
                self._raw.append(text[: head.end])
            return text[head.end :]
        if self.takes_any_order and not isinstance(head, CallHead):
            self._json = JSONEnd()
            self._state = self._in_object
            return text
        return self._refuse(text)

    def _in_arguments(self, text: str) -> str:
        found, at = self._json.feed(text, self._head.depth), self._json.at
        if self._is_streamed:
            self._argue(text[:at])
            if found is Found.BROKEN:  # emitted text cannot be taken back: emit the rest, too
                self._state = self._in_broken
        else:
            self._raw.append(text[:at])
            self._arguments.append(text[:at])
            if found is Found.BROKEN:
                return self._refuse(text[at:])
        if found is Found.END:
            if not self._is_streamed:
                arguments = "".join(self._arguments)
                if _arguments_of({"arguments": arguments}) is None:
                    return self._refuse(text[at:])
                self._raw = []
                self._open(self._head.name, arguments)
            self._state = self._in_rest
            if not self._head.depth:
                self._close()
        return text[at:]

    def _in_rest(self, text: str) -> str:
        """Read the object to its end, after its arguments."""
        found, at = self._json.feed(text), self._json.at
        if found is not Found.MORE:
            self._close()
        return text[at:]

    def _in_object(self, text: str) -> str:
        """Read a call that is emitted only when it is complete."""
        found, at = self._json.feed(text), self._json.at
        self._raw.append(text[:at])
        if found is Found.BROKEN:
            return self._refuse(text[at:])
        if found is Found.END:
            call = self._whole_call("".join(self._raw[1:]))
            if call is None:
                return self._refuse(text[at:])
            self._raw = []
            self._open(*call)
            self._close()
        return text[at:]

    def _in_broken(self, text: str) -> str:
        """Emit arguments that are not JSON, up to the end of their call."""
        mark = self.end_mark
        at = text.find(mark) if mark else -1
        end = at if at >= 0 else end_before_mark(text, (mark,), mark[:1], len(mark))
        self._argue(text[:end])
        if at >= 0:
            self._close()
            return text[end:]
        self._held = text[end:]
        return ""

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

    def _open(self, name: str, arguments: str) -> None:
        self._pieces.append(CallDelta(self.num_calls, arguments, self._make_id(), name))
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(CallDelta(self.num_calls - 1, text))

    def _close(self) -> None:
        self._trims = True
        self._state = self._between if self._is_parallel else self._behind_all

    def _refuse(self, rest: str) -> str:
        """Emit what was read as content, because it is no call. This includes the mark, so reading goes on with
        `rest`."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._in_text
        self._show(raw)
        return rest

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of an object; None if it is no call of a tool."""
        try:
            call = _decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = _arguments_of(call)
        return None if arguments is None else (name, arguments)


def _arguments_of(call: dict[str, Any]) -> str | None:
    """Return the arguments as JSON; None if they are not an object. Models write them as an object or as its text."""
    given: Any = next((call[name] for name in ARGUMENTS if call.get(name) is not None), {})
    try:
        if isinstance(given, dict):
            return msgspec.json.encode(given).decode()
        return given if isinstance(given, str) and isinstance(_decode(given), dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
