"""The vision tower in turns: a computation that waits at a block, so that other requests compute steps between.

The tower is the library's code, which stops for nobody. So it runs in a thread of its own, which computes only while
the step thread waits for it (`advance`). They never compute at once, so nothing here needs a lock, and the numbers are
those of one piece, on as many threads of the CPU. On a GPU the thread launches into the stream of the step thread. So
its kernels and those of steps are computed in the order of their launches, and memory that one frees the other may use.

Every rank of an instance has the same turns: which blocks a turn computes is in the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from chitu.engine.executor import TowerTurn
from chitu.errors import Internal
from chitu.models.model import AtBlock
from chitu.net.threads import ServiceThread
from chitu.ops.cuda_device import on_stream


class _Dropped(BaseException):
    """Unwinds a computation that nobody needs."""


class TowerTurns:
    """One computation. Step thread only."""

    def __init__(self, compute: Callable[[AtBlock], None], device: torch.device) -> None:
        """`compute` gets what it is to call before each block. It begins with the first turn."""
        self._compute = compute
        self._threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._turn: TowerTurn | None = None
        """Of the step thread; None once the computation is dropped."""
        self._error: BaseException | None = None
        self._is_done = False
        ServiceThread("tower", self._run).start()

    def advance(self, turn: TowerTurn) -> None:
        """Compute up to a block. Raises what the computation raises, which is over then."""
        self._turn = turn
        if not self._is_done:
            self._hand_over()
        if self._error is not None:
            raise self._error
        if turn.is_last and not self._is_done:
            raise Internal("the vision tower waits in its last turn")

    def drop(self) -> None:
        """End the computation where it is. What it holds is free then. Idempotent."""
        self._turn = None
        if not self._is_done:
            self._hand_over()

    def _hand_over(self) -> None:
        self._go.release()
        self._back.acquire()

    # ----------------------------------------------------------------------------------------- the thread of the tower

    def _run(self) -> None:
        self._go.acquire()
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode(), on_stream(self._stream):
                if self._turn is not None:
                    self._compute(self._at_block)
        except _Dropped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._is_done = True
            self._back.release()

    def _at_block(self, number: int, count: int) -> None:
        """Wait until a turn has this block, the `number`-th of `count` from 0 on."""
        while self._turn is not None and not self._turn.is_last and number * self._turn.of >= self._turn.blocks * count:
            self._back.release()
            self._go.acquire()
        if self._turn is None:
            raise _Dropped
