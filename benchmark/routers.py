"""What a second complete router brings, and costs: `python -m benchmark.routers [--count 2000]`.

Starts one router, then two behind one port (`router.hosts`), with fake instances that join all of them. Reads from the
kernel the CPU time of each router's threads: a request's, with the load spread by the kernel over both; and with
`--count` instances that join at once, until every router lists all, and while nothing happens but heartbeats. If a
router of two spends on half of the requests what one router spends on each of its own, then two on cores of their own
take twice as many: rates are not compared, since routers, load and instances share this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import uvloop
from support.router_process import cpu_seconds, wait_until

from benchmark.joins import Prober
from benchmark.router import _small_model, load, make_requests
from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of
from chitu.config.load import load_topology
from chitu.config.topology import routers, with_router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.tools.bench.report import DEFAULT_DIR, publish

ROUTER = "dp_config.router"
FAKES = 500
"""Most fake instances of a process, which has sockets of its own for each of them and each router."""
PORTS = [
    *(f"{ROUTER}.{name}_port=0" for name in ("stats", "token")),
    *(f"{ROUTER}.pd_disaggregation.{name}_port=0" for name in ("coordination", "metadata_sync", "bootstrap")),
]


@dataclass(slots=True)
class Running:
    """Routers of one cluster."""

    cluster: LocalCluster
    folder: Path

    @property
    def pids(self) -> list[int]:
        return [self.cluster.pid(name) for name in self.cluster.router_urls]

    @contextlib.contextmanager
    def fakes(self, names: Sequence[str]) -> Iterator[None]:
        """Run fake instances that join all routers."""
        ports = []
        for each in routers(with_router_ports(self.cluster.topology, self.cluster.ports)):
            pd = each.pd_disaggregation
            ports.append((pd.coordination_port, pd.metadata_sync_port, each.stats_port, each.token_port))
        flags = ("--coordination-port", "--metadata-sync-port", "--stats-port", "--token-port")
        argv = [sys.executable, "-m", "support.fake_worker", "--instances", ",".join(names), "--host", "127.0.0.1"]
        for flag, port in zip(flags, ports[0], strict=True):
            argv += [flag, str(port)]
        argv += ["--more-routers", ";".join(",".join(map(str, each)) for each in ports[1:])]
        argv += ["--vocab-size", str(1 << 20)]
        environment = {**os.environ, ENVIRONMENT_KEY: cluster_key_of(self.cluster.topology)}
        with (self.folder / "fakes.log").open("ab") as log:
            process = subprocess.Popen(argv, stderr=log, env=environment)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def running(folder: Path, model: Path, count: int) -> Iterator[Running]:
    folder.mkdir()
    hosts = f"{ROUTER}.hosts=[{', '.join(['127.0.0.1'] * count)}]"
    lease = f"{ROUTER}.pd_disaggregation.deadlines.lease_s=60"  # one core for all of it: what is late here is not lost
    settings = [hosts, lease, f"{ROUTER}.policy=round_robin", "model.served_name=bench"]
    topology = load_topology("router_alone", [f"model.path={model}", *PORTS, *settings])
    with LocalCluster(topology, log_dir=str(folder / "logs")) as cluster:
        wait_until(lambda: not cluster.missing(), 60, lambda: str(cluster.missing()))
        yield Running(cluster, folder)


def measured(run: Running, args: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Return the requests that each router took in a slice of load, and the CPU seconds of each."""
    urls, port = list(run.cluster.router_urls.values()), run.cluster.ports["port"]
    requests, clients = make_requests("bench", args.tokens, False), args.concurrency * len(urls)
    before, cpu_s = counted(urls), [cpu_seconds(pid) for pid in run.pids]
    uvloop.run(load(port, run.pids, requests, False, clients, args.seconds))
    spent_s = [cpu_seconds(pid) - was for pid, was in zip(run.pids, cpu_s, strict=True)]
    return [after - was for after, was in zip(counted(urls), before, strict=True)], spent_s


def requests_rows(runs: Sequence[Running], args: argparse.Namespace) -> Iterator[tuple[object, ...]]:
    """Yield, by number of routers: requests, the share of each router, CPU of a request of its own (median of rounds,
    in which the clusters take turns), and how many requests of a core's work the routers do over one."""
    found: list[list[tuple[list[int], list[float]]]] = [[] for _ in runs]
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.fakes(("P0", "D0")))
            with contextlib.ExitStack() as asking:
                urls = run.cluster.router_urls.values()
                each = [asking.enter_context(Prober(int(url.rsplit(":", 1)[1]))) for url in urls]
                for prober in each:
                    wait_until(partial(_has_both, prober), 60, "P0 and D0 to join")
        for turn in range(args.rounds + 1):
            for run, rounds in zip(runs, found, strict=True):
                result = measured(run, args)
                if turn:  # caches were cold
                    rounds.append(result)
    base_us = 0.0
    for run, rounds in zip(runs, found, strict=True):
        taken = [sum(column) for column in zip(*(numbers for numbers, _ in rounds), strict=True)]
        costs_us = [median(1e6 * s[i] / n[i] for n, s in rounds if n[i]) for i in range(len(taken))]
        base_us = base_us or costs_us[0]
        shares = ", ".join(f"{n / sum(taken):.2f}" for n in taken)
        scale = f"{sum(base_us / cost_us for cost_us in costs_us):.2f}"
        yield len(run.pids), sum(taken), shares, ", ".join(f"{cost_us:.0f}" for cost_us in costs_us), scale


def _has_both(prober: Prober) -> bool:
    return len(prober.names) == 2


def counted(urls: Sequence[str]) -> list[int]:
    """Return the requests that each router has accepted."""
    found = []
    for url in urls:
        lines = RouterClient(url).get("/metrics", timeout_s=60).decode().splitlines()
        found.append(int(float(next(x for x in lines if x.startswith("chitu_requests_total ")).split()[1])))
    return found


def joins_row(run: Running, args: argparse.Namespace) -> tuple[object, ...]:
    """Return routers, instances, seconds until each lists all, CPU of a join and idle share of a core, by router."""
    names = [f"{'PD'[k % 2]}{k // 2}" for k in range(args.count)]
    urls = list(run.cluster.router_urls.values())
    with contextlib.ExitStack() as fakes:
        with contextlib.ExitStack() as asking:
            probers = [asking.enter_context(Prober(int(url.rsplit(":", 1)[1]))) for url in urls]
            begin_s, cpu_s = time.perf_counter(), [cpu_seconds(pid) for pid in run.pids]
            for start in range(0, args.count, FAKES):
                fakes.enter_context(run.fakes(names[start : start + FAKES]))
            wait_until(
                lambda: all(len(prober.names) >= args.count for prober in probers),
                args.timeout_s,
                lambda: ", ".join(f"{len(prober.names)} of {args.count}" for prober in probers),
            )
            seconds = time.perf_counter() - begin_s
            spent = [(cpu_seconds(pid) - was) / args.count * 1e3 for pid, was in zip(run.pids, cpu_s, strict=True)]
        cpu_s, begin_s = [cpu_seconds(pid) for pid in run.pids], time.perf_counter()
        time.sleep(args.idle_s)
        passed_s = time.perf_counter() - begin_s
        idle = [(cpu_seconds(pid) - was) / passed_s for pid, was in zip(run.pids, cpu_s, strict=True)]
        members = [len(prober.names) for prober in probers]
    return len(urls), min(members), seconds, *(", ".join(f"{x:.2f}" for x in each) for each in (spent, idle))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.routers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="instances that join at once; 0: do not measure it")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per request")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a slice of load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=32, help="clients for each router")
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="time for all to join")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    joins: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = _small_model(folder)
        with running(folder / "1", model, 1) as one, running(folder / "2", model, 2) as two:
            rows = list(requests_rows((one, two), args))
        columns = ("routers", "requests", "share of each", "CPU us/request", "times one")
        publish("routers", columns, rows, args.json_dir)
        for count in (1, 2) if args.count else ():
            with running(folder / f"joins-{count}", model, count) as run:
                joins.append(joins_row(run, args))
    if joins:
        columns = ("routers", "instances", "s until listed", "CPU ms/join of each", "idle cores of each")
        publish("routers-joins", columns, joins, args.json_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
