"""The lifetime of every process of the router: a timer, and two requests to end.

Used by `RouterProcess` and `ReplicaProcess`, each on its loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

TICK_S = 0.05


class Ending:
    """A request to end. The first `ask` starts the drain, the next one ends the wait for it."""

    def __init__(self) -> None:
        self.is_due = asyncio.Event()
        self.is_hurried = asyncio.Event()

    def ask(self) -> None:
        if self.is_due.is_set():
            self.is_hurried.set()
        self.is_due.set()


def keep_ticking(*ticks: Callable[[], None]) -> None:
    """Call all `ticks` now and every `TICK_S`, as long as the loop runs. A tick that fails is logged; it prevents
    neither the other ticks nor the next round, and does not end the process."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            for tick in ticks:
                try:
                    tick()
                except Exception:
                    log.exception("a periodic task failed")
        finally:
            loop.call_later(TICK_S, run)

    run()
