"""Goodput of a cluster under more load than it can carry: `python -m benchmark.overload [--engine tiny] [...]`.

Starts 1P1D (real processes, real transfers), measures with a closed loop the rate that it sustains, then offers 0.5, 1,
2 and 3 times that as Poisson arrivals. Goodput counts the answers whose first token arrives within `--ttft-s` and whose
last one within `--done-s`; a client that waited that long disconnects. With admission control the router rejects early
every request that would wait longer than `--max-queue-s`; `--without-admission` shows the cluster without it.

`--engine timed` (default): steps take a configured time (`executors.py`), so the figures are the system's and not
the machine's. P is the bottleneck, or D with `--bottleneck decode` (few running requests). `--engine tiny`: chitu-tiny
computes, on the cores that router and load generator also use.

Exits with code 1 if goodput at three times the load is below 90 % of its peak, or a rejection is not a typed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model

from benchmark.open_loop import Connections, Outcome, closed_loop, offer
from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.tools.bench.report import DEFAULT_DIR, publish

LEVELS = (0.5, 1.0, 2.0, 3.0)
WANTED_RATIO = 0.9
OUTPUT_TOKENS = 16
NO_BOUND_S = 100_000
PACE = EngineConfig(step_s=0.010, prompt_token_s=0.0001)
"""Step times of `--engine timed`: 10,000 prompt tokens a second at most."""
RUNNING_ON_D = {"prefill": 64, "decode": 6}
COLUMNS = (
    *("load", "offered/s", "admitted", "rejected", "rejected p50 ms", "rejected p99 ms"),
    *("failed", "left", "goodput/s", "of peak", "TTFT p50 s", "TTFT p99 s"),
)


@dataclass(slots=True, frozen=True)
class Level:
    """One row of the result: the load that was offered, and its outcomes."""

    load: float
    rate: float
    outcomes: list[Outcome]
    goodput: float
    """Good answers a second, over the time until the last answer was complete."""

    @property
    def rejected(self) -> list[Outcome]:
        """Requests that the router rejected before it sent anything to an instance."""
        return [o for o in self.outcomes if o.retry_after and (o.status == 429 or o.code == "overloaded")]

    @property
    def failed(self) -> int:
        """Number of requests without an answer, a rejection with Retry-After, or a client that left."""
        return sum(not o.is_whole and o.status != 0 for o in self.outcomes) - len(self.rejected)

    def row(self, peak: float) -> tuple[object, ...]:
        whole = [o for o in self.outcomes if o.is_whole]
        left = sum(o.status == 0 for o in self.outcomes)
        rejections_ms = sorted(1e3 * o.total_s for o in self.rejected if o.total_s is not None)
        firsts_s = sorted(o.first_s for o in whole if o.first_s is not None)
        return (
            *(f"{self.load:g}x", round(self.rate, 1), len(self.outcomes) - len(self.rejected), len(rejections_ms)),
            *(_quantile(rejections_ms, 0.5), _quantile(rejections_ms, 0.99), self.failed, left),
            *(round(self.goodput, 1), round(self.goodput / peak, 2) if peak else 0.0),
            *(_quantile(firsts_s, 0.5), _quantile(firsts_s, 0.99)),
        )


def _quantile(values: Sequence[float], share: float) -> float | str:
    return round(values[min(len(values) - 1, int(len(values) * share))], 3) if values else "-"


def make_requests(prompt_tokens: int) -> Iterator[bytes]:
    """Return an endless iterator of streamed completion requests with token ids as prompts."""
    rng = random.Random(7)
    return itertools.cycle([_request([rng.randrange(10, 500) for _ in range(prompt_tokens)]) for _ in range(256)])


def _request(prompt: list[int]) -> bytes:
    fields = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    raw = json.dumps({**fields, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    )
    return head.encode() + b"\r\n\r\n" + raw


async def measure(port: int, args: argparse.Namespace) -> tuple[float, list[Level], float]:
    """Return (sustained rate, the levels, the worst lateness of the generator in seconds)."""
    requests, connections = make_requests(args.prompt_tokens), Connections(port)
    rng = random.Random(11)
    worst_s = 0.0

    def note_late(late_s: float) -> None:
        nonlocal worst_s
        worst_s = max(worst_s, late_s)

    await closed_loop(connections, requests, 4, 1.0, args.done_s)  # warm
    sustained = await closed_loop(connections, requests, args.clients, args.seconds, args.done_s)
    levels = []
    for load in args.levels:
        rate = load * sustained
        start_s = time.perf_counter()
        outcomes = await offer(connections, requests, rate, args.seconds, args.done_s, rng, note_late)
        good = sum(o.is_whole and (o.first_s or 0.0) <= args.ttft_s for o in outcomes)
        levels.append(Level(load, rate, outcomes, good / (time.perf_counter() - start_s)))
    connections.close()
    return sustained, levels, worst_s


def cluster_of(args: argparse.Namespace, folder: Path) -> LocalCluster:
    """Return the cluster to measure. `folder` takes the model files of `--engine timed`."""
    is_timed = args.engine == "timed"
    admission = "dp_config.router.admission.max_queue_s"
    overrides = [
        f"model.path={make_checksum_model(folder, PACE) if is_timed else TINY_MODEL_DIR}",
        "model.served_name=m",
        "model.dtype=float32",
        "log.level=WARNING",
        "cache.num_pages=4096",
        f"scheduler.max_running_requests={RUNNING_ON_D[args.bottleneck]}",
        f"{admission}={NO_BOUND_S if args.without_admission else args.max_queue_s}",
    ]
    if args.without_admission:  # the deadlines of the instances would still bound the queue
        overrides += [
            f"dp_config.router.pd_disaggregation.deadlines.{key}={NO_BOUND_S}" for key in ("queue_s", "transfer_s")
        ]
    return LocalCluster(load_topology("pd_disagg_1p1d_local", overrides), entries=ENTRIES if is_timed else Entries())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.overload", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", choices=("timed", "tiny"), default="timed")
    parser.add_argument("--bottleneck", choices=tuple(RUNNING_ON_D), default="prefill")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each level")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="times the sustained rate")
    parser.add_argument("--clients", type=int, default=32, help="of the closed loop")
    parser.add_argument("--ttft-s", type=float, default=2.0)
    parser.add_argument("--done-s", type=float, default=10.0)
    parser.add_argument("--max-queue-s", type=float, default=1.0, help="admission.max_queue_s")
    parser.add_argument("--without-admission", action="store_true")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, cluster_of(args, Path(folder) / "model") as cluster:
        cluster.wait_ready()
        sustained, levels, late_s = uvloop.run(measure(cluster.ports["port"], args))
    peak = max(level.goodput for level in levels)
    publish("overload", COLUMNS, [level.row(peak) for level in levels], args.json_dir)
    print(f"sustained by a closed loop of {args.clients}: {sustained:.1f}/s; the generator was late by {late_s:.3f} s")
    print(f"took {time.monotonic() - begin_s:.0f} s")
    is_right = levels[-1].goodput >= WANTED_RATIO * peak and not any(level.failed for level in levels)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
