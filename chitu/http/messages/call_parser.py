"""Parsing of tool calls in a model's text: what all formats share. Pure; loop thread.

A call is emitted when its object is complete and valid, or lacks only brackets at its end. Text that is no call of an
offered tool is content, as it was written but without the marks of the format. So the parts of a stream are always the
answer that is not streamed, and arguments are always a JSON object. Only text that may be a call is held back, and no
character is read more than a few times.
"""

from __future__ import annotations

import abc
import functools
import os
import re
from collections.abc import Callable, Collection
from typing import ClassVar

from chitu.http.messages.call_objects import (
    Call,
    CallDelta,
    Found,
    JSONEnd,
    Piece,
    call_of,
    closed,
    json_text,
    may_be_call,
)
from chitu.protocol import ToolFields
from chitu.tokenizer.stop import end_before_mark

MAX_HEAD_CHARS = 512
"""Characters of a call up to its object, and of an object up to the name of its tool if no mark announces a call."""
PIECE_CHARS = 2048
"""Characters read at once; small, because each state copies what it leaves to the next one."""
FENCE = "```"
_OPENING = re.compile(r"\s*(?:```\w*\s*)?(?:\[\s*)?")
"""What may precede the object of a call: a code fence, and the bracket of an array of calls."""
_TAG_END = re.compile(r">|(?=[\n<])")
_FENCE_BEGUN = re.compile(r"\s*`{1,2}\Z")


class CallParser(abc.ABC):
    """Parser of one choice: `push` its text, then `finish`."""

    marks: ClassVar[tuple[str, ...]]
    """Marks that begin a call in free text. They are no content, unless they have no brackets."""
    hidden: ClassVar[tuple[str, ...]] = ()
    """Further marks that are no content wherever they stand."""
    tags: ClassVar[tuple[str, ...]] = ()
    """Texts that are no content in what looked like a call: marks, or how tags begin that end with `>`."""
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
    section_begin: ClassVar[str] = ""
    """Text between the trigger and the first call of a section."""
    section_end: ClassVar[str] = ""
    """What ends a section that is enforced; empty: `end_mark`."""
    marks_text: ClassVar[bool] = False
    """Text has marks, too, which are no content, so the parser also reads answers without tools."""

    def __init__(self, names: Collection[str], is_parallel: bool, is_enforced: bool = False) -> None:
        """`names`: names of the tools. Unless `is_parallel`, nothing is read after the first call. `is_enforced`: a
        grammar has calls follow schemas where they are as `written`, so without a mark only these are calls."""
        self.num_calls = 0
        self._names = names
        self._is_parallel = is_parallel
        self._is_enforced = is_enforced
        self._texts, self._starts, self._longest = _marks_of(type(self), False)
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
        self._is_refused = False
        """What is read now looked like a call and is none, up to the next mark."""
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
        self._finish_object(is_whole)
        if self._raw or self._state == self._in_text:
            self._show(self._bare("".join(self._raw) + held))
        return self._pieces

    def _finish_object(self, is_whole: bool) -> None:
        """Emit a call whose object lacks only brackets."""
        if is_whole and self._state in (self._in_object, self._behind_broken):
            call, rest = self._closed_call() if self._raw[-1].rstrip().endswith(("}", "]")) else (None, "")
            if call is not None and not rest.strip():
                self._emit(call)

    @classmethod
    @abc.abstractmethod
    def written(cls, name: str) -> tuple[str, str]:
        """Return what the model writes before the arguments of a call, and what it writes after them."""

    @classmethod
    def behind_index(cls, name: str) -> str:
        """Return what follows the number that is behind the beginning of a call; empty: there is no number."""
        return cls.index_end

    def _make_id(self) -> str:
        return f"call_{os.urandom(12).hex()}"

    # ------------------------------------------- states: each takes text, which is not empty, and returns what is left

    def _in_text(self, text: str) -> str:
        found = [(at, -len(mark)) for mark in self._texts if (at := text.find(mark)) >= 0]
        if not found:
            end = end_before_mark(text, self._texts, self._starts, self._longest)
            self._show(text[:end])
            self._held = text[end:]
            return ""
        at, negative = min(found)
        end = at - negative
        mark, rest = text[at:end], text[end:]
        self._show(text[:at])
        if mark in self.marks:
            self._set_refused(False)
            self._has_mark = True
            self._closers = (self.end_mark,) if self.end_mark else ()
            return self._begin(mark, rest)
        if mark == self.end_mark:
            self._set_refused(False)
        elif mark in self.tags and mark[-1] not in ">]":
            self._state = self._in_tag
        return rest

    def _in_tag(self, text: str) -> str:
        """Show the name in a tag."""
        found = _TAG_END.search(text)
        self._show((text if found is None else text[: found.start()]).replace('"', ""))
        if found is None:
            return ""
        self._state = self._in_text
        return text[found.end() :]

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
        if found is Found.BROKEN:
            self._state = self._behind_broken
            return text[at:]
        call, rest = self._call("".join(self._raw[2:])), ""
        if call is None:
            call, rest = self._closed_call()
        if call is None:
            return self._refuse(text[at:])
        self._emit(call)
        return rest + text[at:]

    def _behind_broken(self, text: str) -> str:
        """Read what follows text that is no JSON any more: if it ends the call, only brackets may be missing."""
        ends = self._object_ends()
        if text.startswith(ends):
            call, rest = self._closed_call()
            if call is not None:
                self._emit(call)
                return rest + text
        elif any(end.startswith(text) for end in ends):
            self._held = text
            return ""
        return self._refuse(text)

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

    def _bare(self, text: str) -> str:
        """Return text without the marks in it; of tags their names stay."""
        return _noise_of(type(self)).sub(
            lambda found: found[found.lastindex].replace('"', "") if found.lastindex else "", text
        )

    def _set_refused(self, is_refused: bool) -> None:
        if is_refused is not self._is_refused:
            self._is_refused = is_refused
            self._texts, self._starts, self._longest = _marks_of(type(self), is_refused)

    def _object_ends(self) -> tuple[str, ...]:
        """Return the texts that end a call whose object lacks brackets."""
        return (*self._closers, *(mark.strip() for mark in self.marks))

    def _closed_call(self) -> tuple[Call | None, str]:
        """Return the call whose object lacks brackets, and what of it is behind them."""
        text, rest = closed("".join(self._raw[2:]))
        return self._call(text), rest

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
        """Emit what was read as content, because it is no call. Reading goes on with `rest`."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._in_text
        self._set_refused(True)
        self._show(self._bare(raw))
        return rest


@functools.cache
def _marks_of(parser: type[CallParser], is_refused: bool) -> tuple[tuple[str, ...], frozenset[str], int]:
    """Return what is not content, the first characters of these texts, and the length of the longest."""
    texts = (*parser.marks, *parser.hidden, *(parser.tags if is_refused else ()))
    return texts, frozenset(text[0] for text in texts), max(map(len, texts))


@functools.cache
def _noise_of(parser: type[CallParser]) -> re.Pattern[str]:
    """Return the pattern of what is no content in a refused call. A mark without brackets is text, too."""
    known = {text.strip() for text in (*parser.marks, *parser.hidden, *parser.tags)}
    texts = sorted([text for text in known if text[0] in "<["], key=len, reverse=True)
    return re.compile(
        "|".join(re.escape(text) + ("" if text[-1] in ">]" else r"([^<>\n]*)>?") for text in texts) or r"(\Z)"
    )
