"""Messages of gpt-oss: an answer is several, each with a channel (the harmony format). Pure.

The prompt ends with `<|start|>assistant`. The model writes `<|channel|>analysis<|message|>`, its reasoning, `<|end|>`
and `<|start|>assistant`. Then there is another message: `<|channel|>final<|message|>` and what the user reads, or
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>` and the arguments of a call; `<|call|>`, an eos, is
behind them. The recipient may also stand ahead of the channel. Commentary to nobody is content. So is a text without
such a head, or to a tool that was not offered.

Models leave marks out and garble heads. So any mark ends a message, a head may lack any of its parts, and what names
the tool may have more around its name. No mark is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from chitu.http.messages.call_objects import Call, MessageDelta, Piece, tool_of
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser
from chitu.tokenizer.stop import end_before_mark

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
NEXT = f"{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
RETURN, CONSTRAIN = "<|return|>", "<|constrain|>"
_ENDS = (END, CALL, RETURN)
_CHANNELS = ("analysis", "commentary", "final")
_WORDS = (*_CHANNELS, "assistant", "json", "code", "to=")
"""Words of a head. What follows the last one is of no matter."""
_CHANNEL = re.compile("|".join(_CHANNELS))
_RECIPIENT = re.compile(r"\bto=\s*([^\s<]+)")
_RECIPIENT_ALONE = re.compile(r"<\|channel\|>.*?\b(functions\.[^\s<]+)", re.DOTALL)
_HEAD = re.compile(
    r"\s*(?:assistant\b)?\s*(?:to=[^\s<]+\s*)?(?:<\|channel\|>\s*)+(?:analysis|commentary|final)?"
    r"(?:\s*to=[^\s<{]+)?\s*(?:<\|constrain\|>\s*)?(?:json\b|code\b)?(?:<\|?\w{1,12}\|?>)?"
)
"""A head without the mark behind it, which may be misspelled."""
_BEGUN_MARK = re.compile(r"\A\s*<\|?\w{0,20}\|?>?")
_MARK = re.compile(r"<\|(?:start|channel|message|end|call|constrain|return)\|>")
_OTHER_MARK = re.compile(r"<\|\w{1,12}\|?>")
"""A misspelled mark."""
_GAP = "\n\n"


class HarmonyParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN, RETURN)
    needed: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    trigger: ClassVar[str] = CHANNEL
    text_begin: ClassVar[str] = FINAL
    marks_text: ClassVar[bool] = True

    def __init__(
        self,
        names: Collection[str],
        is_parallel: bool,
        is_enforced: bool = False,
        is_split: bool = True,
        shows_reasoning: bool = True,
    ) -> None:
        """`is_split`: the reasoning is separate; False: it is content."""
        super().__init__(names, is_parallel, is_enforced)
        self._is_split, self._shows_reasoning = is_split, shows_reasoning
        self._has_said = self._has_thought = False
        self._is_new = False
        """The next text begins a message."""
        self._is_between = False
        """A mark ended the message before; text up to the next mark belongs to a head."""
        self._state = self._in_head

    @property
    def is_reasoning(self) -> bool:
        return self._is_split and self._state == self._in_thought

    @classmethod
    def written(cls, name: str) -> tuple[str, str]:
        return f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}", ""

    def finish(self, is_whole: bool = True) -> list[Piece]:
        self._pieces = []
        held, self._held = self._held, ""
        if self._state == self._in_head:
            found = _HEAD.match(held)
            if found is not None and not _may_be_head(held[found.end() :]):  # without the mark behind the head
                rest = self._read_head(found[0], held[found.end() :])
                while rest:
                    rest = self._state(rest)
                held, self._held = self._held, ""
            elif self._is_between or _MARK.search(held):
                held = _without_role(held)
            if _may_be_head(held) and (self._is_between or held.lstrip().startswith("<|")):
                held = ""  # a head that was cut off is no text
        self._finish_object(is_whole)
        if self._state == self._ahead_of_object and is_whole:
            self._emit(Call(self._name, "{}"))
        elif self._state == self._in_thought:
            self._think(held)
        elif self._state != self._between:
            self._show(self._bare("".join(self._raw[1:]) + held))
        return self._pieces

    # ------------------------------------------------------------------------------------------------------ states

    def _in_head(self, text: str) -> str:
        """Read up to the text of a message."""
        self._is_new = True
        for found in _MARK.finditer(text[:MAX_HEAD_CHARS]):
            before, rest = text[: found.start()], text[found.end() :]
            if not (self._is_between or _MARK.search(before) or _may_be_head(before)):
                self._state = self._in_text
                return text
            if found[0] == MESSAGE:
                return self._read_head(before, rest)
            if found[0] not in (CHANNEL, CONSTRAIN):
                self._read_without_mark(before, found[0])
                self._is_between = True
                return rest
        if len(text) > MAX_HEAD_CHARS:
            head = _HEAD.match(text[:MAX_HEAD_CHARS])
            if head is None:
                self._state = self._in_text
                return _without_role(text) if self._is_between else text
            return self._read_head(head[0], text[head.end() :])
        if not (self._is_between or _MARK.search(text) or _may_be_head(text[: self._end_of(text)])):
            self._state = self._in_text
            return text
        self._held = text
        return ""

    def _read_without_mark(self, text: str, mark: str) -> None:
        """Read what is between two marks, of which the first begins no text. `mark`: the second one."""
        head = _HEAD.match(text)
        if head is not None and text[head.end() :].strip():  # a message without the mark behind its head
            rest = self._read_head(head[0], text[head.end() :] + END)
            while rest and self._state != self._in_head:
                rest = self._state(rest)
        elif head is None and mark in _ENDS and not _may_be_head(text):
            self._show(_OTHER_MARK.sub("", text))

    def _read_head(self, head: str, rest: str) -> str:
        to = _RECIPIENT.search(head) or _RECIPIENT_ALONE.search(head)
        channel = _CHANNEL.search(head if to is None else head[: to.start(1)] + head[to.end(1) :])
        self._name = tool_of(to[1], self._names) if to is not None else ""
        if self._name:
            self._raw = [head]
            self._state = self._ahead_of_object
        elif channel is not None and channel[0] == _CHANNELS[0] and to is None:
            self._state = self._in_thought
        else:
            self._state = self._in_text
            if channel is None and to is None and not self._is_between and not _may_be_head(self._bare(head)):
                self._show(self._bare(head))
        return rest

    def _ahead_of_object(self, text: str) -> str:
        rest = text.lstrip()
        mark = _MARK.match(rest)
        if mark is not None and mark[0] in (MESSAGE, CONSTRAIN):
            return rest[mark.end() :]
        if mark is not None:
            self._emit(Call(self._name, "{}"))
            return rest
        if any(known.startswith(rest) for known in self.marks):
            self._held = rest
            return ""
        return self._read_object("", rest) if rest[0] in '{"' else self._refuse(rest)

    def _in_thought(self, text: str) -> str:
        return self._in_message(text, self._think)

    def _in_text(self, text: str) -> str:
        return self._in_message(text, self._show)

    def _in_message(self, text: str, show: Callable[[str], None]) -> str:
        found = _MARK.search(text)
        if found is None:
            end = self._end_of(text)
            show(text[:end])
            self._held = text[end:]
            return ""
        show(text[: found.start()])
        if found[0] in (MESSAGE, CONSTRAIN):
            return text[found.end() :]
        self._state = self._in_head
        return text[found.start() :]

    def _between(self, text: str) -> str:
        """Read what follows a call."""
        rest = text.lstrip()
        if rest.startswith("}"):  # models close one object too many
            return rest[1:]
        if rest:
            self._is_between, self._state = True, self._in_head
        return rest

    # ------------------------------------------------------------------------------------------------------ their parts

    def _end_of(self, text: str) -> int:
        """Return where a mark may have begun, at the end of a text without one."""
        return end_before_mark(text, self._texts, self._starts, self._longest)

    def _refuse(self, rest: str) -> str:
        """Emit the text of a message that is no call as content, without its head."""
        raw, self._raw = "".join(self._raw[1:]), []
        self._state = self._in_text
        self._show(self._bare(raw))
        return rest

    def _think(self, text: str) -> None:
        if not self._is_split:
            self._show(text)
        elif text:
            gap = _GAP if self._is_new and self._has_thought else ""
            self._is_new, self._has_thought = False, True
            if self._shows_reasoning:
                self._pieces.append(MessageDelta(reasoning=gap + text))

    def _show(self, text: str) -> None:
        if text:
            gap = _GAP if self._is_new and self._has_said else ""
            self._is_new, self._has_said = False, True
            self._pieces.append(gap + text)


def _without_role(text: str) -> str:
    return text.lstrip().removeprefix("assistant").lstrip()


def _may_be_head(text: str) -> bool:
    """Return whether a text without marks may be a head, or a part of one. It may begin with a misspelled mark."""
    text = _BEGUN_MARK.sub("", text, count=1).lstrip().removeprefix("assistant")
    *words, last = [*text.split(), *([""] if text[-1:].isspace() or not text else [])]
    return all(word in _WORDS or word.startswith("to=") for word in words) and (
        last.startswith("to=") or any(word.startswith(last) for word in _WORDS)
    )
