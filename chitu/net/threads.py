"""Threads of a worker process, and the end of a process despite its threads. A thread that dies unexpectedly ends its
process, and logs it: a half-dead process would keep its lease and lose requests silently.

A `JobThread` is a thread of its own for jobs that may take long (checksums, scatters), done one after the other in
order. It has one owner; `put` returns at once. Without `start`, `run_one` does one job in the caller's thread (tests).
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

logger = logging.getLogger(__name__)

EXIT_DEAD_THREAD = 70


def end_process(code: int) -> NoReturn:
    """Exit at once. Everything is closed already. A regular exit waits for threads, which may be in a file system that
    hangs, and spends a second of CPU time on unloading torch."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


class ServiceThread(threading.Thread):
    """Runs `target` to its end; an exception ends the process with `EXIT_DEAD_THREAD`.

    It uses the GPU of the thread that creates it. CUDA's default is the first GPU of the machine, and would take memory
    there.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._run_target = target
        cuda = _cuda_in_use()
        self._device: int | None = cuda.current_device() if cuda is not None else None

    def run(self) -> None:
        _name_os_thread(self.name)
        try:
            if self._device is not None:
                _cuda_in_use().set_device(self._device)
            self._run_target()
        except BaseException:
            try:
                logger.critical("thread %s died; ending the process", self.name, exc_info=True)
                for handler in logging.getLogger().handlers:
                    handler.flush()
            finally:
                os._exit(EXIT_DEAD_THREAD)


def _name_os_thread(name: str) -> None:
    """Set the thread's name in top and py-spy, where all threads are called `python` otherwise."""
    pr_set_name = 15
    ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)


def _cuda_in_use() -> Any:
    """Return `torch.cuda` if this process computes on a GPU, else None. Imports nothing."""
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class Waker:
    """Wakes one thread that sleeps in `wait`. Any thread may `wake`; never blocks; wakes are never lost."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> None:
        """Return at the next wake (also one that came before), or after the timeout."""
        self._event.wait(timeout_s)
        self._event.clear()


Job = TypeVar("Job")
Spawn = Callable[[str, Callable[[], None]], threading.Thread]
"""Makes a thread of this name that runs this function; its death must end the process."""


class JobThread(Generic[Job]):
    """Calls `work(job)` for each job, holding no lock; an exception in it ends the thread, and so the process."""

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._name = name
        self._work = work
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queue a job. Any thread may call it."""
        self._waiting.put(job)

    def start(self, spawn: Spawn) -> None:
        self._thread = spawn(self._name, self._loop)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop after the jobs that wait. A thread that does not end in time is reported."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s did not stop within %g s", self._thread.name, timeout_s)

    def run_one(self) -> bool:
        """Do one job in this thread; return False if none waits."""
        try:
            job = self._waiting.get_nowait()
        except queue.Empty:
            return False
        if job is not None:
            self._work(job)
        return job is not None

    def _loop(self) -> None:
        while (job := self._waiting.get()) is not None:
            self._work(job)
