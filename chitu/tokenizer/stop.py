"""Stop strings in a stream of text. One scanner a choice, owned by the router's loop.

The result does not depend on how the text is split into deltas: the stop string that is complete first ends the text
(of several complete at the same character, the one that began first), so a client gets the same text streamed or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from chitu.errors import InvalidRequest

FIRST_MARK = 0xD800


def end_before_mark(text: str, marks: Sequence[str], heads: Collection[str], longest: int) -> int:
    """Return the index of the longest end of the text that may become one of the marks, or the text's length if there
    is none. The text must hold no whole mark. `heads`: the marks' first characters; `longest`: length of the longest.
    Text before that index is never searched again, so a text in pieces costs no more than its length."""
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if text[at] in heads:
            rest = text[at:]
            if any(mark.startswith(rest) for mark in marks):
                return at
    return len(text)


class StopScanner:
    """A scanner that holds back the longest end of the text that may become a stop string, and nothing more."""

    __slots__ = ("_heads", "_held", "_include_stop", "_longest", "_stopped", "_stops", "_texts", "found", "marks")

    def __init__(
        self, stops: Sequence[str], include_stop: bool = False, special: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`include_stop`: end the text after the stop string, not before it. `special`: ids, by text, of tokens that
        are not part of the text but of stop strings. InvalidRequest if a stop string is empty."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        # Half a surrogate pair is in no text, and takes the place of such a token.
        marks = {text: chr(FIRST_MARK + i) for i, text in enumerate(sorted(special, key=len, reverse=True))}
        self.marks = {special[text]: mark for text, mark in marks.items()}
        """What to push for these tokens."""
        self._texts = {ord(mark): text for text, mark in marks.items()}
        with_marks = []
        for stop in stops if marks else ():
            for text, mark in marks.items():
                stop = stop.replace(text, mark)
            with_marks.append(stop)
        self._stops = tuple(dict.fromkeys((*stops, *with_marks)))
        self._include_stop = include_stop
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False
        self.found = ""
        """The stop string that was hit; empty: none yet."""

    def push(self, delta: str) -> tuple[str, bool]:
        """Return the text that may be emitted now, and whether a stop string was hit. After a hit drop all text."""
        if self._stopped:
            return "", True
        text = self._held + delta if self._held else delta
        for stop in self._stops:
            if stop in text:
                return self._cut(text), True
        at = end_before_mark(text, self._stops, self._heads, self._longest)
        self._held = text[at:]
        return self._shown(text[:at]), False

    def _cut(self, text: str) -> str:
        """Return the text up to the stop string that it holds."""
        self._stopped = True
        self._held = ""
        end, start = min((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0)
        self.found = text[start:end].translate(self._texts)
        shown = self._shown(text[:start])
        return shown + self.found if self._include_stop else shown

    def _shown(self, text: str) -> str:
        """Return the text without marks."""
        return text.translate(dict.fromkeys(self._texts)) if self._texts else text

    def finish(self) -> str:
        """Return the text held back, after the request ended for another reason."""
        held, self._held = self._held, ""
        return self._shown(held)
