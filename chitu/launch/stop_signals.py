"""The signals that end a launcher: SIGTERM, Ctrl-C, SIGHUP of a terminal that closes. Used by `serve.py` and `node.py`,
in the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets; the second one raises SystemExit.

    A SIGHUP that is ignored stays so (nohup), and none is a second signal: the shell and the kernel send one each.
    """
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number != signal.SIGHUP:
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
