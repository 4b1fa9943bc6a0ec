"""The signals that end a launcher: SIGTERM, Ctrl-C, SIGHUP of a terminal that closes. Used by `serve.py` and `node.py`,
in the main thread."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A request to end, which a signal handler can set while its own thread waits for it: with `threading.Event` it
    would wait for ever for the lock that its thread holds just then."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for `timeout_s`. Return whether it is set."""
        if not self._is_set:
            with suppress(queue.Empty):
                self._wake.get(timeout=timeout_s)
        return self._is_set


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Yield a request that the first signal sets. Ctrl-C after it raises SystemExit.

    Other signals after the first do not, since they come in twos: Slurm sends SIGTERM twice at a time limit, the shell
    and the kernel send SIGHUP for a terminal that closes. A SIGHUP that is ignored stays so (nohup).
    """
    stop = StopRequest()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise SystemExit(128 + number)  # the supervisor kills what is left at exit
        stop.set()

    handled = [number for number in SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == handle:  # else the launcher ignores it from now on
                signal.signal(number, handler)
