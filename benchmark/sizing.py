"""What `chitu size` predicts, against real clusters: `python -m benchmark.sizing [--engine tiny] [...]`.

Goodput of 1P1D, 2P1D, 1P2D and 2P2D: the highest rate at which 90 % of the requests keep the SLO. The simulation finds
it by bisection. Then a real cluster (processes, sockets, transfers) gets the same requests at the same moments,
stretched to rates around the prediction, until two of them, one above and one below, are close; between them it is
interpolated.

`--engine timed` (default): steps take a configured time, long ones, so that few cores carry several instances, and the
figures are the system's. The profile of the simulation is that of the configuration, with the time of turns and
messages measured on the spot from single requests. `--engine cpu`: a random model of 34 M parameters computes, by
default on 1P1D alone, since each instance needs a core of its own; its profile is what `chitu bench profile` measures
on the spot.

Exits with code 1 if a prediction is off by more than `--bound` (5 %; 15 % with `cpu`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model

from benchmark.open_loop import Connections, Outcome, ask
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.simulation.profile import EngineProfile, LinkCost, StepCost
from chitu.tools.bench.profile import describe, measure
from chitu.tools.bench.report import DEFAULT_DIR, publish
from chitu.tools.make_model import make_model
from chitu.tools.size.search import Question, Shape, Slo, Split
from chitu.tools.size.workload import Request, Workload

SHAPES = (Split(1, 1), Split(2, 1), Split(1, 2), Split(2, 2))
PACE = EngineConfig(step_s=0.08, prompt_token_s=0.001)
RUNNING = 4
"""Requests that decode at once on a D of the timed engine."""
SLOS = {"timed": Slo(2.0, 0.1), "cpu": Slo(2.0, 0.1)}
COLUMNS = ("shape", "predicted/s", "real/s", "error", "TTFT p50 s", "real TTFT", "TPOT p50 ms", "real TPOT", "runs")
CLOSE = 1.06
"""Ratio of two rates, of which one keeps the SLO, that ends the search on a real cluster."""
MAX_RUNS = 7


@dataclass(slots=True, frozen=True)
class RealTrial:
    """A real cluster at a rate."""

    rate: float
    attained: float
    ttft_p50_s: float
    tpot_p50_s: float


def make_workload(count: int, seed: int) -> Workload:
    rng = random.Random(seed)
    requests, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        requests.append(Request(at_s, rng.randint(128, 384), rng.randint(8, 24)))
    return Workload(tuple(requests), "sizing")


def body(request: Request, rng: random.Random) -> bytes:
    fields = {
        "model": "m",
        "prompt": [rng.randrange(10, 500) for _ in range(request.prompt_tokens)],
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    raw = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw


async def offer(port: int, workload: Workload, rate: float) -> list[Outcome]:
    """Send the requests at their moments, stretched to `rate`, and wait for all answers."""
    rng, connections = random.Random(3), Connections(port)
    bodies = [body(request, rng) for request in workload.requests]
    due_s = [arrival.at_s for arrival in workload.arrivals(rate)]
    begin_s, tasks = time.perf_counter() + 0.1, []
    for raw, at_s in zip(bodies, due_s, strict=True):
        await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(connections, raw, begin_s + at_s, 600.0)))
    outcomes = await asyncio.gather(*tasks)
    connections.close()
    return list(outcomes)


def run_real(port: int, workload: Workload, rate: float, slo: Slo) -> RealTrial:
    outcomes = uvloop.run(offer(port, workload, rate))
    ttfts, tpots, kept = [], [], 0
    for outcome, request in zip(outcomes, workload.requests, strict=True):
        if not outcome.is_whole or outcome.first_s is None or outcome.total_s is None:
            continue
        tpot_s = (outcome.total_s - outcome.first_s) / max(1, request.output_tokens - 1)
        ttfts.append(outcome.first_s)
        tpots.append(tpot_s)
        kept += outcome.first_s <= slo.ttft_s and tpot_s <= slo.tpot_s
    trial = RealTrial(rate, kept / len(outcomes), _median(ttfts), _median(tpots))
    print(
        f"  real at {rate:.2f}/s: {trial.attained:.1%}, TTFT {trial.ttft_p50_s:.3f} s, TPOT {trial.tpot_p50_s:.4f} s",
        flush=True,
    )
    return trial


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def real_goodput(port: int, workload: Workload, guess: float, slo: Slo) -> tuple[float, list[RealTrial]]:
    """Return the highest rate that keeps the SLO, and all trials."""
    trials: list[RealTrial] = []
    low: RealTrial | None = None
    high: RealTrial | None = None
    rate = guess
    for _ in range(MAX_RUNS):
        trial = run_real(port, workload, rate, slo)
        trials.append(trial)
        if trial.attained >= slo.share:
            low = trial
        else:
            high = trial
        if low is None:
            rate *= 0.92
        elif high is None:
            rate *= 1.08
        elif high.rate / low.rate > CLOSE:
            rate = math.sqrt(low.rate * high.rate)
        else:
            break
    if low is None or high is None:
        return rate, trials
    over = (low.attained - slo.share) / max(1e-9, low.attained - high.attained)
    return low.rate + min(1.0, over) * (high.rate - low.rate), trials


def random_model(folder: Path) -> Path:
    return make_model(
        folder,
        family="qwen3",
        hidden_size=512,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=8192,
    )


def topology_of(split: Split, engine: str, folder: Path) -> Topology:
    of_router = "dp_config.router"
    overrides = [
        f"model.path={make_checksum_model(folder, PACE) if engine == 'timed' else random_model(folder)}",
        "model.served_name=m",
        "model.dtype=float32",
        "log.level=WARNING",
        "cache.num_pages=4096",
        "cache.prefix_cache=false",
        f"{of_router}.prefill_schedulers=[{', '.join(['{}'] * split.prefill)}]",
        f"{of_router}.decode_schedulers=[{', '.join(['{}'] * split.decode)}]",
        f"scheduler.max_running_requests={RUNNING if engine == 'timed' else 16}",
        "scheduler.threads=1",
    ]
    return load_topology("pd_disagg_1p1d_local", overrides)


def timed_profile(port: int) -> EngineProfile:
    """Return the profile of the timed engine: the configured times, with what one idle request takes beyond them."""
    cost = StepCost(prompt_token_s=PACE.prompt_token_s, decode_s=PACE.step_s)
    profile = EngineProfile(
        cost,
        LinkCost(bytes_per_s=1e9, write_s=0.0005),
        name="timed",
        num_pages=4096,
        kv_bytes_per_token=64,
        num_layers=2,
        vocab_size=512,
        max_running_requests=RUNNING,
    )
    alone = Workload(tuple(Request(float(at), 256, 16) for at in range(12)), "alone")
    slo = Slo(60.0, 60.0)
    real = run_real(port, alone, 0.4, slo)
    predicted = Question(alone, slo, {Shape(): profile}).trial(Split(1, 1), 0.4, is_whole=True).quantiles()
    step_s = max(0.0, real.tpot_p50_s - predicted["tpot_p50_s"])
    rest_s = max(0.0, real.ttft_p50_s - predicted["ttft_p50_s"])
    print(f"  a turn takes {1e3 * step_s:.2f} ms, the ways of a first token {1e3 * rest_s:.2f} ms", flush=True)
    return msgspec.structs.replace(
        profile,
        cost=msgspec.structs.replace(cost, turn_s=step_s),
        link=msgspec.structs.replace(profile.link, message_s=profile.link.message_s + max(0.0, rest_s - step_s) / 3),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.sizing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engine", choices=tuple(SLOS), default="timed")
    parser.add_argument("--requests", type=int, default=80, help="of each run")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", help="default: 1P1D, 2P1D, 1P2D and 2P2D; with cpu 1P1D")
    parser.add_argument("--bound", type=float, help="largest error; default: 0.05, with tiny 0.15")
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    bound = args.bound or (0.05 if args.engine == "timed" else 0.15)
    workload, slo = make_workload(args.requests, args.seed), SLOS[args.engine]
    shapes = args.shapes or [split.name for split in (SHAPES if args.engine == "timed" else SHAPES[:1])]
    begin_s, rows, worst = time.monotonic(), [], 0.0
    for split in [split for split in SHAPES if split.name in shapes]:
        print(split.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            topology = topology_of(split, args.engine, Path(folder) / "m")
            with LocalCluster(topology, entries=ENTRIES if args.engine == "timed" else Entries()) as cluster:
                cluster.wait_ready()
                port = cluster.ports["port"]
                run_real(port, Workload(workload.requests[:4], "warm"), 2.0, slo)
                profile = timed_profile(port) if args.engine == "timed" else measure(cluster.url, topology)
                print(f"  {describe(profile)}", flush=True)
                question = Question(workload, slo, {Shape(): profile})
                best = question.max_rate(split)
                print(f"  predicted {best.rate:.2f}/s", flush=True)
                goodput, trials = real_goodput(port, workload, best.rate, slo)
        near = min(trials, key=lambda trial: abs(trial.rate - best.rate))
        at_near = question.trial(split, near.rate, is_whole=True).quantiles()
        error = best.rate / goodput - 1
        worst = max(worst, abs(error))
        rows.append(
            (
                *(split.name, round(best.rate, 2), round(goodput, 2), f"{error:+.1%}"),
                *(round(at_near["ttft_p50_s"], 3), round(near.ttft_p50_s, 3)),
                *(round(1e3 * at_near["tpot_p50_s"], 1), round(1e3 * near.tpot_p50_s, 1), len(trials)),
            )
        )
    publish("sizing", COLUMNS, rows, args.json_dir)
    print(f"worst error {worst:.1%} of {bound:.0%}; took {time.monotonic() - begin_s:.0f} s")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
