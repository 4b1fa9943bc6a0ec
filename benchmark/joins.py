"""What a join costs the router, by the number of instances: `python -m benchmark.joins [--counts 50 2000]`.

Starts the real router and fake instances in two processes that all join at once, and asks `/health` meanwhile. Reads
from the kernel the CPU time of all threads of the router: until all instances are in its view, for one more instance
after that, and while nothing happens but heartbeats. `lag` is how late a timer of the router's loop came at most, from
`/metrics`. The fakes of a process share one subscription to the view, so what 2,000 subscribers cost is not measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from support.router_process import RouterUnderTest, cpu_seconds, wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.launch.router_client import RouterClient
from chitu.net.client import Server
from chitu.protocol import (
    PROTOCOL_VERSION,
    InstanceInfo,
    Join,
    JoinReply,
    KVLayout,
    coordination_reply_codec,
    encode,
)
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.types import Role, new_incarnation

PROBE_S = 0.2
"""Pause between two questions to `/health`: at 2,000 instances an answer has 150 kB."""
MORE = 40
"""Instances that join one by one when the others are there."""
PAUSE_S = 0.03
QUIET = 0.03
"""Share of a core below which the router has read all heartbeats; it checks its leases still."""
LEASE = "dp_config.router.pd_disaggregation.deadlines.lease_s=600"
"""Stopped fakes stay members."""
LAG = "chitu_router_loop_lag_seconds_bucket"


@dataclass(slots=True)
class Prober:
    """Asks `/health` over one connection until `stop`, in a thread of its own."""

    port: int
    longest_s: float = 0.0
    names: frozenset[str] = frozenset()
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Prober:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(PROBE_S):
            begin_s = time.perf_counter()
            body = Server.at(f"http://127.0.0.1:{self.port}").ask("GET", "/health", timeout_s=120).body
            self.longest_s = max(self.longest_s, time.perf_counter() - begin_s)
            self.names = frozenset(part.split(b'"', 1)[0].decode() for part in body.split(b'"name":"')[1:])


@dataclass(slots=True)
class Result:
    count: int
    seconds: float
    """Until all were in the view."""
    cpu_ms_per_join: float
    cpu_ms_one_more: float
    idle_cpu: float
    """Share of a core while nothing happens but heartbeats."""
    health_ms: float
    """Longest answer of `/health`."""
    lag_ms: float
    """Upper bound of the bucket with the largest lag of the loop."""
    metrics_bytes: int


def measure(folder: Path, count: int, timeout_s: float, idle_s: float) -> Result:
    names = [f"{'PD'[k % 2]}{k // 2}" for k in range(count)]
    folder.mkdir()
    with RouterUnderTest(folder, TINY_MODEL_DIR, [LEASE]) as router:
        pid = router.pid
        with Prober(router.ports["port"]) as prober:
            before_s, begin_s = cpu_seconds(pid), time.perf_counter()
            half = (count + 1) // 2
            for part in (names[:half], names[half:]):
                if part:
                    router.start_worker(",".join(part), wait=False)
            wait_until(
                lambda: len(prober.names) >= count, timeout_s, lambda: f"{len(prober.names)} of {count} have joined"
            )
            seconds, cpu_s = time.perf_counter() - begin_s, cpu_seconds(pid) - before_s
            health_s = prober.longest_s
        idle = _share(pid, idle_s)
        _signal(router, signal.SIGSTOP)  # so that their heartbeats are not counted
        wait_until(lambda: _share(pid, 0.3) < QUIET, timeout_s, "a router that has nothing to do")
        quiet = _share(pid, idle_s)  # its own timers, and the pings of its connections
        before_s, begin_s = cpu_seconds(pid), time.perf_counter()
        _join_one_by_one(router.ports["coordination_port"], count)
        one_more_s = cpu_seconds(pid) - before_s - quiet * (time.perf_counter() - begin_s)
        _signal(router, signal.SIGCONT)
        metrics = RouterClient(router.url).get("/metrics", timeout_s=120)
        return Result(
            count, seconds, cpu_s / count * 1e3, one_more_s / MORE * 1e3, idle, health_s * 1e3, _lag(metrics) * 1e3,
            len(metrics),
        )  # fmt: skip


def _signal(router: RouterUnderTest, number: int) -> None:
    for worker in router.workers:
        worker.send_signal(number)


def _share(pid: int, seconds: float) -> float:
    before_s, begin_s = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pid) - before_s) / (time.perf_counter() - begin_s)


def _join_one_by_one(port: int, first_rank: int) -> None:
    """Join instances that nothing listens for, each `PAUSE_S` after the last, so that no two are gathered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    layout = KVLayout.uniform("fake", 2, 2, 16, 16, "float32", 512)
    for rank in range(first_rank, first_rank + MORE):
        info = InstanceInfo(Role.PREFILL, rank, new_incarnation(), "127.0.0.1", 9, 9, layout, 4096)
        socket.send(encode(Join(PROTOCOL_VERSION, info)))
        reply = coordination_reply_codec.decode(socket.recv())
        if isinstance(reply, JoinReply) and reply.code:
            raise RuntimeError(reply.message)
        time.sleep(PAUSE_S)
    context.destroy(linger=0)


def _lag(metrics: bytes) -> float:
    """Return the smallest bound that all lags of the loop are within."""
    buckets = {}
    for line in metrics.decode().splitlines():
        if line.startswith(LAG):
            buckets[float(line.split('"')[1])] = float(line.rsplit(" ", 1)[1])
    return min(bound for bound, number in buckets.items() if number == max(buckets.values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.joins", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 2000])
    parser.add_argument("--timeout-s", type=float, default=60.0, help="time for all to join")
    parser.add_argument("--idle-s", type=float, default=5.0, help="duration of the measurement without joins")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(Path(folder) / str(n), n, args.timeout_s, args.idle_s) for n in args.counts]
    columns = (
        "instances",
        "s",
        "CPU ms/join",
        "CPU ms/one more",
        "idle cores",
        "/health ms",
        "lag ms",
        "/metrics bytes",
    )
    rows = [dataclasses.astuple(result) for result in results]
    publish("joins", columns, rows, args.json_dir)
    print(f"load average: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
