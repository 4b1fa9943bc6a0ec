"""Calls at the end of a reasoning that was never closed. Pure; loop thread.

Models forget the mark that closes a reasoning and go on with a call, and then the answer ends. Calls with nothing
behind them, not even that mark, are meant; all others are drafts, and reasoning. So text from a mark of a call on is
held back until something else follows or the reasoning ends.
"""

from __future__ import annotations

from collections.abc import Callable

from chitu.http.messages.call_objects import Piece
from chitu.http.messages.call_parser import CallParser
from chitu.tokenizer.stop import end_before_mark

MAX_CHARS = 200_000
"""Characters of a reasoning that are read as calls. It may have the same ones many times."""


class OpenCalls:
    """Reader of one reasoning: `push` its text, then `close` or `finish`."""

    def __init__(self, make: Callable[[], CallParser], marks: tuple[str, ...]) -> None:
        """`make` returns a new parser of calls, which begin with one of `marks`."""
        self._make = make
        self._marks = marks
        self._starts = frozenset(mark[0] for mark in marks)
        self._longest = max(map(len, marks))
        self._held = ""
        """Text in which a mark may have begun."""
        self._trial: CallParser | None = None
        """Reads what may be calls; None: no mark was read."""
        self._raw: list[str] = []
        """What it has read."""
        self._num_tried = 0

    def push(self, text: str) -> str:
        """Return the reasoning that can be emitted now."""
        shown: list[str] = []
        text, self._held = self._held + text, ""
        while text:
            if self._trial is not None:
                text = self._try(text, shown)
                continue
            at = min((at for mark in self._marks if (at := text.find(mark)) >= 0), default=-1)
            if at < 0 or self._num_tried >= MAX_CHARS:
                end = end_before_mark(text, self._marks, self._starts, self._longest) if at < 0 else len(text)
                shown.append(text[:end])
                self._held = text[end:]
                break
            shown.append(text[:at])
            text = text[at:]
            self._trial, self._raw = self._make(), []
        return "".join(shown)

    def close(self) -> str:
        """Return the rest, which is reasoning."""
        text = "".join([*self._raw, self._held])
        self._trial, self._raw, self._held = None, [], ""
        return text

    def finish(self, is_whole: bool) -> tuple[str, str]:
        """Return the rest of the reasoning, and the text of the calls behind it. No more text follows."""
        shown: list[str] = []
        while is_whole and (trial := self._trial) is not None:
            if not _has_text(trial.finish()) and trial.num_calls:
                return "".join(shown), "".join(self._raw)
            shown.append(self.push(self._give_up(shown)))
        return "".join([*shown, self.close()]), ""

    def _try(self, text: str, shown: list[str]) -> str:
        """Read calls up to something else, and return what is to be read again."""
        trial = self._trial
        assert trial is not None
        for place, letter in enumerate(text, 1):
            self._raw.append(letter)
            self._num_tried += 1
            if _has_text(trial.push(letter)) or self._num_tried == MAX_CHARS:
                return self._give_up(shown) + text[place:]
        return ""

    def _give_up(self, shown: list[str]) -> str:
        """Show the first mark of what looked like calls as reasoning, and return what is behind it."""
        raw, self._trial, self._raw = "".join(self._raw), None, []
        size = max(len(mark) for mark in self._marks if raw.startswith(mark))
        shown.append(raw[:size])
        return raw[size:]


def _has_text(pieces: list[Piece]) -> bool:
    return any(isinstance(piece, str) and piece.strip() for piece in pieces)
