"""What other threads have for the step thread: requests and cancellations, and calls that it is to make.

Any thread puts in, which wakes the step thread; that alone takes out, in the order of arrival. Owned by `PDScheduler`.
A deque suffices: operations at its ends are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from chitu.protocol import DecodeRequest, PrefillRequest, SchedulerMessage, UnifiedRequest

StepCommand = SchedulerMessage | Callable[[], None]
"""A message of the router, or a call for the step thread."""


class Inbox:
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._words: deque[StepCommand] = deque()

    def __len__(self) -> int:
        return len(self._words)

    def put(self, word: StepCommand) -> None:
        self._words.append(word)
        self._wake()

    def take(self) -> Iterator[StepCommand]:
        """Yield messages until none is left, including those that arrive meanwhile."""
        while self._words:
            yield self._words.popleft()

    def waiting(self) -> tuple[int, int]:
        """Return the number of requests not taken yet, and of their prompt tokens on P, cached or not. Any thread."""
        new = [m for m in tuple(self._words) if isinstance(m, (PrefillRequest, DecodeRequest, UnifiedRequest))]
        count = sum(1 if isinstance(message, PrefillRequest) else len(message.forks) or 1 for message in new)
        return count, sum(len(message.token_ids) // 4 for message in new if not isinstance(message, DecodeRequest))
