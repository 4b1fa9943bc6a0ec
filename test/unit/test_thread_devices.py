"""The GPU of a process's threads: a thread works on the device of the thread that made it, and on no other."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import chitu
from chitu.net.threads import JobThread, ServiceThread


class FakeCuda:
    """A fake of CUDA: each thread begins on device 0."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.is_used = True
        self.chosen: dict[str, int] = {}
        """Device of each thread, by its name."""

    def is_initialized(self) -> bool:
        return self.is_used

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: int) -> None:
        self._local.device = device
        self.chosen[threading.current_thread().name] = device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    return fake


def test_a_thread_works_on_the_device_of_the_thread_that_made_it(cuda: FakeCuda) -> None:
    cuda.set_device(3)
    seen: list[int] = []
    outer = ServiceThread("outer", lambda: _run(ServiceThread("inner", lambda: seen.append(cuda.current_device()))))
    _run(outer)
    assert seen == [3]
    assert cuda.chosen == {threading.current_thread().name: 3, "outer": 3, "inner": 3}


def test_jobs_run_on_the_device_of_their_maker(cuda: FakeCuda) -> None:
    cuda.set_device(1)
    jobs = JobThread[int]("verify", lambda _job: None)
    jobs.start(ServiceThread)
    jobs.close()
    assert cuda.chosen["verify"] == 1


def test_a_process_without_a_gpu_is_not_asked_for_one(cuda: FakeCuda) -> None:
    cuda.is_used = False
    _run(ServiceThread("plain", lambda: None))
    assert not cuda.chosen


def test_no_thread_that_may_touch_a_device_is_made_in_another_way() -> None:
    """A stream is entered only together with its device: leaving it would otherwise select another device."""
    root = Path(chitu.__file__).parent
    instance = [
        path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("tools", "process", "launch")
    ]
    made = [path for path in instance if re.search(r"threading\.Thread\(|ThreadPoolExecutor\(", path.read_text())]
    # threads that only read files or compile grammars
    allowed = {"models/config.py", "grammars/store.py"}
    assert {str(path.relative_to(root)) for path in made} <= allowed | {"net/threads.py"}
    entered = [path for path in instance if "torch.cuda.stream(" in path.read_text()]
    assert [str(path.relative_to(root)) for path in entered] == ["ops/cuda_device.py"]


def _run(thread: threading.Thread) -> None:
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
