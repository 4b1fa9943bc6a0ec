"""CPU cost of trace records: `python -m benchmark.trace [--rounds N] [--requests N] [--json-dir DIR]`.

Four 1P1D clusters with the embedded model differ only in `trace.sample` (0 twice, 0.01, 1). The same requests go to
them in turn, round after round. Measured is the CPU time of all threads of router, P and D, so that other work on the
machine counts little; `seconds` is wall time. The second cluster without tracing shows how much of a difference is
chance.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
from support.router_process import cpu_seconds

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.tools.bench.report import DEFAULT_DIR, publish

MODES = {"off": 0.0, "off again": 0.0, "1 %": 0.01, "all": 1.0}
CLIENTS, PROMPT_TOKENS, TOKENS = 8, 256, 32


class Cost(msgspec.Struct, frozen=True):
    traced: str
    cpu_ms_per_request: float
    """Median over the rounds."""
    over_off: float
    """Median over the rounds of the ratio to the cluster without tracing."""
    seconds: float
    """Wall time of a round, median."""
    rounds: int
    requests: int


def started(stack: ExitStack, name: str, sample: float) -> LocalCluster:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    settings = [
        *(f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=2000", "scheduler.threads=1"),
        *(f"trace.sample={sample}", f"trace.dir={folder}", "dp_config.router.pd_disaggregation.transport=shm"),
        *("cache.prefix_cache=false", "dp_config.router.port=0"),
    ]
    topology = load_topology("pd_disagg_1p1d_local.yaml", settings)
    cluster = stack.enter_context(LocalCluster(topology, log_dir=str(Path(folder) / "logs"), restart=False))
    cluster.wait_ready(120)
    return cluster


def pids(cluster: LocalCluster) -> list[int]:
    """Return the ids of all processes of its members, including the ranks that torchrun starts."""
    found = [member.child.pid for member in cluster.members.values() if member.child is not None]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def ask(url: str, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    RouterClient(url).post("/v1/completions", body, timeout_s=300)


def measure(rounds: int, num_requests: int) -> list[Cost]:
    rng = random.Random(5)
    prompts = [[rng.randrange(16, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
    cpu_s: dict[str, list[float]] = {name: [] for name in MODES}
    wall_s: dict[str, list[float]] = {name: [] for name in MODES}
    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as clients:
        clusters = {name: started(stack, name, sample) for name, sample in MODES.items()}
        for turn in range(rounds + 1):
            names = list(MODES)
            rng.shuffle(names)
            for name in names:
                url, processes = clusters[name].url, pids(clusters[name])
                before_s, start_s = sum(map(cpu_seconds, processes)), time.monotonic()
                list(clients.map(lambda prompt, url=url: ask(url, prompt), prompts))
                if turn:  # the first turn is the warm-up
                    wall_s[name].append(time.monotonic() - start_s)
                    cpu_s[name].append(sum(map(cpu_seconds, processes)) - before_s)
    return [
        Cost(
            name,
            1000 * statistics.median(own) / num_requests,
            statistics.median(each / off for each, off in zip(own, cpu_s["off"], strict=True)),
            statistics.median(wall_s[name]),
            rounds,
            num_requests,
        )
        for name, own in cpu_s.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    arguments = parser.parse_args(argv)
    costs = measure(arguments.rounds, arguments.requests)
    rows = [
        (c.traced, f"{c.cpu_ms_per_request:.2f}", f"{c.over_off:.3f}", f"{c.seconds:.2f}", c.rounds, c.requests)
        for c in costs
    ]
    publish(
        "trace", ("traced", "CPU ms/request", "over off", "seconds", "rounds", "requests"), rows, arguments.json_dir
    )


if __name__ == "__main__":
    main()
