"""Messages from other threads to the step thread: requests, cancellations, and changes of the router.

Any thread puts messages in; the step thread alone takes them out, in the order of arrival. Owned by `PDScheduler`. A
deque suffices: operations at its ends are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from chitu.protocol import DecodeRequest, PrefillRequest, SchedulerMessage, UnifiedRequest


@dataclass(slots=True, frozen=True)
class RouterReplaced:
    """A new router has replaced the old one: the tokens of the old one's requests have no reader."""


@dataclass(slots=True, frozen=True)
class RouterSilent:
    """The router was silent beyond its limit. It may come back."""

    silence_s: float


@dataclass(slots=True, frozen=True)
class WorkerGone:
    """An API process of the router has ended."""

    incarnation: int


@dataclass(slots=True, frozen=True)
class CacheFlush:
    """An operator asked to flush the prefix cache."""


@dataclass(slots=True, frozen=True)
class GrammarCompiled:
    """The grammar of an earlier request is compiled, or failed to; the grammar store has the outcome."""

    room: bytes


StepCommand = SchedulerMessage | RouterReplaced | RouterSilent | WorkerGone | CacheFlush | GrammarCompiled


class Inbox:
    def __init__(self) -> None:
        self._words: deque[StepCommand] = deque()

    def __len__(self) -> int:
        return len(self._words)

    def put(self, word: StepCommand) -> None:
        self._words.append(word)

    def take(self) -> Iterator[StepCommand]:
        """Yield messages until none is left, including those that arrive meanwhile."""
        while self._words:
            yield self._words.popleft()

    def waiting(self) -> tuple[int, int]:
        """Return the number of requests not taken yet, and of their prompt tokens to compute here. Any thread."""
        new = [m for m in tuple(self._words) if isinstance(m, (PrefillRequest, DecodeRequest, UnifiedRequest))]
        count = sum(1 if isinstance(message, PrefillRequest) else len(message.forks) or 1 for message in new)
        return count, sum(len(message.token_ids) // 4 for message in new if not isinstance(message, DecodeRequest))
