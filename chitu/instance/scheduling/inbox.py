"""What other threads ask of the step thread: requests, cancellations, and what becomes of the router.

Any thread puts in, the step thread alone takes out, in the order in which things came. Owned by `PDScheduler`. A deque
is enough: its ends are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from chitu.protocol import DecodeRequest, PrefillRequest, SchedulerMessage, UnifiedRequest


@dataclass(slots=True, frozen=True)
class RouterReplaced:
    """Another router is there: nobody reads the tokens of what the old one sent."""


@dataclass(slots=True, frozen=True)
class RouterSilent:
    """The router counts as gone, but may come back."""

    silence_s: float


@dataclass(slots=True, frozen=True)
class WorkerGone:
    """An API process of the router has ended."""

    incarnation: int


@dataclass(slots=True, frozen=True)
class CacheFlush:
    """An operator wants what is cached forgotten."""


@dataclass(slots=True, frozen=True)
class GrammarCompiled:
    """Of a request that came before: what it needs can be found, or why it cannot be made."""

    room: bytes


Word = SchedulerMessage | RouterReplaced | RouterSilent | WorkerGone | CacheFlush | GrammarCompiled


class Inbox:
    def __init__(self) -> None:
        self._words: deque[Word] = deque()

    def __len__(self) -> int:
        return len(self._words)

    def put(self, word: Word) -> None:
        self._words.append(word)

    def take(self) -> Iterator[Word]:
        """Until nothing is left; what comes meanwhile is taken too."""
        while self._words:
            yield self._words.popleft()

    def waiting(self) -> tuple[int, int]:
        """Requests that nobody took yet, and the prompt tokens in them that are to be computed here. Any thread."""
        new = [m for m in tuple(self._words) if isinstance(m, (PrefillRequest, DecodeRequest, UnifiedRequest))]
        count = sum(1 if isinstance(message, PrefillRequest) else len(message.forks) or 1 for message in new)
        return count, sum(len(message.token_ids) // 4 for message in new if not isinstance(message, DecodeRequest))
