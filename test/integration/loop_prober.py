"""How long the loop of a router does not answer because of its own work, and how much memory it takes."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from raw_http import RawClient, http_request


def waited_s(process: int | str, thread: int | None = None) -> float:
    """Return the seconds in which its threads (or that one) were ready to run and had no core."""
    tasks = Path(f"/proc/{process}/task")
    total_ns = 0
    for task in [tasks / str(thread)] if thread is not None else list(tasks.iterdir()):
        try:
            total_ns += int((task / "schedstat").read_text().split()[1])
        except FileNotFoundError:
            continue
    return total_ns / 1e9


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


class Prober:
    """Probes the router's loop over and over, in its own thread, and keeps the longest wait for an answer."""

    def __init__(self, port: int, pid: int) -> None:
        """Of the router with this port and process."""
        self._client = RawClient(port)
        self._pid = pid
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._worst_s = 0.0
        self._num_probes = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._client.close()

    def take(self) -> float:
        """Return the longest wait since the last call, less the time that the machine took. A running probe counts for
        the call in which it ends, so wait for two."""
        begun = self._num_probes
        while self._num_probes < begun + 2 and self._thread.is_alive():
            self._is_over.wait(0.001)
        with self._lock:
            worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def _run(self) -> None:
        me = threading.get_native_id()
        request = http_request("GET", "/livez", b"", {})
        while not self._is_over.is_set():
            before_s = waited_s(self._pid) + waited_s("self", me)
            began_s = time.monotonic()
            assert self._client.exchange(request).status == 200
            took_s = time.monotonic() - began_s
            taken_s = waited_s(self._pid) + waited_s("self", me) - before_s
            with self._lock:
                self._worst_s = max(self._worst_s, took_s - taken_s)
            self._num_probes += 1
            self._is_over.wait(0.002)
