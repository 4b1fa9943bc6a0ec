"""Stop strings in a stream of text. One scanner a choice, owned by the router's loop.

The outcome does not depend on how the text is cut into deltas: the stop string that is complete first ends the text
(of several complete at the same character, the one that began first), so a client sees the same text streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from chitu.errors import InvalidRequest


class StopScanner:
    """Holds back the longest end of the text that may become a stop string, and nothing more."""

    __slots__ = ("_heads", "_held", "_include_stop", "_stopped", "_stops")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the text ends after the stop string instead of before it. InvalidRequest on an empty one."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._heads = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> tuple[str, bool]:
        """Text that may be emitted now, and whether a stop string was hit. After a hit everything is swallowed."""
        if self._stopped:
            return "", True
        text = self._held + delta if self._held else delta
        for stop in self._stops:
            if stop in text:
                return self._cut(text), True
        # The first place from which all the rest may begin a stop string. What is passed over here is never looked at
        # again, so the whole text costs no more than its length, whatever the stop strings are.
        for at, character in enumerate(text):
            if character in self._heads:
                rest = text[at:]
                if any(stop.startswith(rest) for stop in self._stops):
                    self._held = rest
                    return text[:at], False
        self._held = ""
        return text, False

    def _cut(self, text: str) -> str:
        """The text up to its hit; it holds a stop string."""
        self._stopped = True
        self._held = ""
        end, start = min((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0)
        return text[: end if self._include_stop else start]

    def finish(self) -> str:
        """The text held back: the request ended for another reason."""
        held, self._held = self._held, ""
        return held
