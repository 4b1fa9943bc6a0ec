"""Messages of gpt-oss: an answer is several, each with a channel (the harmony format). Pure.

The prompt ends with `<|start|>assistant`. The model writes `<|channel|>analysis<|message|>`, its reasoning, `<|end|>`
and `<|start|>assistant`. Then there is another message: `<|channel|>final<|message|>` and what the user reads, or
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>` and the arguments of a call; `<|call|>`, an eos, is
behind them. The recipient may also stand ahead of the channel. Commentary to nobody is content. So is a text without
such a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import ClassVar

from chitu.http.messages.call_objects import Call, MessageDelta, Piece
from chitu.http.messages.call_parser import MAX_HEAD_CHARS, CallParser
from chitu.tokenizer.stop import end_before_mark

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
NEXT = f"{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_BREAK = END + NEXT
"""What ends a message if another one follows. An `<|end|>` alone may be text that the model quotes."""
_HEADS = (CHANNEL, "to=", MESSAGE)
_ON_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_GAP = "\n\n"


class HarmonyParser(CallParser):
    marks: ClassVar[tuple[str, ...]] = (_BREAK,)
    needed: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, END, CALL, "<|constrain|>")
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
        if self._state == self._in_thought:
            self._think(held.removesuffix(END))
        elif self._state == self._in_text:
            self._show(held.removesuffix(END))
        elif self._state == self._ahead_of_object and is_whole:
            self._emit(Call(self._name, "{}"))
        elif self._raw or not held.lstrip().startswith("<|"):  # a head that was cut off is no text
            self._show("".join(self._raw) + held)
        return self._pieces

    # ------------------------------------------------------------------------------------------------------ states

    def _in_head(self, text: str) -> str:
        """Read up to the text of a message."""
        self._is_new = True
        begun = text.lstrip()
        at = text.find(MESSAGE, 0, MAX_HEAD_CHARS)
        if not any(head.startswith(begun[: len(head)]) for head in _HEADS) or (at < 0 and len(text) > MAX_HEAD_CHARS):
            self._state = self._in_text
            return text
        if at < 0:
            self._held = text
            return ""
        head, rest = text[:at], text[at + len(MESSAGE) :]
        channel, recipient = _ON_CHANNEL.search(head), _RECIPIENT.search(head)
        self._name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        if self._name and self._name in self._names:
            self._raw = [head + MESSAGE]
            self._state = self._ahead_of_object
        elif channel is not None and channel[1] == "analysis":
            self._state = self._in_thought
        else:
            self._state = self._in_text
            if recipient is not None:  # of a tool that was not offered
                self._show(head + MESSAGE)
        return rest

    def _ahead_of_object(self, text: str) -> str:
        rest = text.lstrip()
        if rest.startswith((CALL, END)):
            self._emit(Call(self._name, "{}"))
            return rest
        if CALL.startswith(rest) or END.startswith(rest):
            self._held = rest
            return ""
        if rest[0] in '{"':
            return self._read_object("", rest)
        return self._refuse(rest)

    def _in_thought(self, text: str) -> str:
        return self._in_message(text, self._think)

    def _in_text(self, text: str) -> str:
        return self._in_message(text, self._show)

    def _in_message(self, text: str, show: Callable[[str], None]) -> str:
        at = text.find(_BREAK)
        if at >= 0:
            show(text[:at])
            self._state = self._in_head
            return text[at + len(_BREAK) :]
        end = end_before_mark(text, self.marks, self._starts, self._longest)
        show(text[:end])
        self._held = text[end:]
        return ""

    def _between(self, text: str) -> str:
        """Read what follows a call."""
        rest = text.lstrip()
        for mark in (CALL, END):
            if rest.startswith(mark):
                return rest[len(mark) :]
        if rest.startswith(NEXT):
            self._state = self._in_head
            return rest[len(NEXT) :]
        if any(mark.startswith(rest) for mark in (CALL, END, NEXT)):
            self._held = rest
            return ""
        self._state, self._is_new = self._in_text, True
        return rest

    # ------------------------------------------------------------------------------------------------------ their parts

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
