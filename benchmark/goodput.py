"""Goodput over rate: fixed pairs, a mixed pool, and the balancer: `python -m benchmark.goodput [--trace FILE] [...]`.

Runs the real router, schedulers, transfer machines and balancer in virtual time (`chitu/simulation`), over engines
whose steps take the seconds of a profile. Each cluster has the same number of instances. Loads: conversations (a
published trace of Mooncake with `--trace`, else prompts made up in its shape, with prefixes that are shared), long
prompts with short answers, short prompts with long answers, and a load that turns from one into the other and back.
Rates are shares of what the best fixed split could serve if it never waited.

Goodput counts the requests that have all of their tokens, the first one within `TTFT_S` and the others within `TPOT_S`
from one to the next (mean of the request). The balancer begins with an even split. Exits with 1 if it serves less than
0.95 of the best fixed split, which is known in hindsight only, or changes more roles than the load has turns for.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chitu.config.schema import AdmissionConfig, RouterConfig, SchedulerConfig, SLOConfig
from chitu.router.balance import SIDES, Balancer, Change, Fleet, observe
from chitu.simulation.cluster import Arrival, SimulatedCluster, SimulatedRequest
from chitu.simulation.profile import EngineProfile, LinkCost, StepCost
from chitu.tools.bench.report import DEFAULT_DIR, publish

TTFT_S, TPOT_S = 8.0, 0.1
SHARES = (0.5, 0.8, 1.1)
WANTED_RATIO = 0.95
BLOCK_TOKENS = 512
"""Tokens of a block of the trace's `hash_ids`."""
PROFILE = EngineProfile(
    cost=StepCost(prefill_s=0.01, prompt_token_s=1.2e-4, decode_s=0.05, sequence_s=0.001, turn_s=0.001),
    link=LinkCost(bytes_per_s=2e10, write_s=2e-5),
    name="made up",
    num_pages=8192,
    page_size=64,
    kv_bytes_per_token=131072,
    overlap=True,
)
"""8,000 prompt tokens a second, or 50 requests that decode at 10 tokens a second each."""
SCHEDULER = SchedulerConfig(max_batched_tokens=8192, chunk_size=8192, max_running_requests=64)
COLUMNS = (
    *("load", "cluster", "share", "offered/s", "goodput/s", "of best split"),
    *("TTFT p50 s", "p99 s", "TPOT p99 s", "role changes"),
)


class Lengths(NamedTuple):
    prompt: float
    """Mean number of prompt tokens to compute."""
    output: float


LONG, SHORT, TALK = Lengths(8000, 100), Lengths(500, 500), Lengths(7500, 343)


def work_s(lengths: Lengths) -> tuple[float, float]:
    """Return the seconds of a P and of a D that a request takes, if they are as busy as the SLO allows."""
    cost = PROFILE.cost
    pages = PROFILE.num_pages * PROFILE.page_size / (lengths.prompt + lengths.output)
    room = min((TPOT_S - cost.decode_s - cost.turn_s) / cost.sequence_s, SCHEDULER.max_running_requests, pages)
    step_s = cost.decode_s + cost.turn_s + cost.sequence_s * room
    return cost.prefill_s + lengths.prompt * cost.prompt_token_s, lengths.output * step_s / room


def rate_of(lengths: Lengths, instances: int) -> float:
    """Return the requests a second that the best fixed split could serve if it never waited."""
    prefill_s, decode_s = work_s(lengths)
    return max(min(n / prefill_s, (instances - n) / decode_s) for n in range(1, instances))


# --------------------------------------------------------------------------------------------------------------- loads


def length(mean: float, sigma: float, rng: random.Random) -> int:
    """Return a log-normal number of tokens with this mean."""
    return 1 + int(mean * rng.lognormvariate(-sigma * sigma / 2, sigma))


def poisson(lengths: Lengths, rate: float, seconds: float, seed: int, start_s: float = 0.0) -> Iterator[Arrival]:
    """Yield requests that share nothing."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt, output = min(length(lengths.prompt, 0.5, rng), 100_000), length(lengths.output, 0.5, rng)
        yield Arrival(start_s + at_s, prompt, output)


def blocks(ids: Sequence[int], num_tokens: int) -> bytes:
    """Return a prompt of that many tokens in which equal blocks have equal tokens."""
    size = 4 * BLOCK_TOKENS
    whole = b"".join(struct.pack("<i", 1 + number).ljust(size, b"\0") for number in ids)
    return whole[: 4 * num_tokens].ljust(4 * num_tokens, b"\0")


def conversations(rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Yield requests in the shape of the published trace: turns of conversations that grow, lengths with long tails, a
    third of the prompt tokens seen before."""
    rng, at_s, number = random.Random(seed), 0.0, 0
    talks: list[list[int]] = []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        ids = talks.pop(rng.randrange(len(talks))) if talks and rng.random() < 0.45 else []
        for _ in range(max(1, length(7500, 1.1, rng) // BLOCK_TOKENS)):
            ids, number = [*ids, number], number + 1
        ids = ids[:200]
        yield Arrival(at_s, blocks(ids, len(ids) * BLOCK_TOKENS), length(343, 0.8, rng))
        talks.append(ids)
        del talks[:-400]


def traced(path: Path, rate: float, seconds: float) -> Iterator[Arrival]:
    """Yield the first requests of a trace in the format of Mooncake, as it is but for the rate."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    scale = len(rows) / (rows[-1]["timestamp"] / 1000) / rate
    for row in rows:
        at_s = row["timestamp"] / 1000 * scale
        if at_s >= seconds:
            return
        yield Arrival(at_s, blocks(row["hash_ids"], row["input_length"]), max(1, row["output_length"]))


@dataclass(frozen=True)
class Load:
    name: str
    lengths: tuple[Lengths, ...]
    """Of each part, in turn."""
    trace: Path | None = None

    def rate(self, share: float, instances: int, part: int = 0) -> float:
        return share * rate_of(self.lengths[part], instances)

    def arrivals(self, share: float, instances: int, seconds: float) -> Iterator[Arrival]:
        rate, part_s = self.rate(share, instances), seconds / len(self.lengths)
        if self.trace is not None:
            yield from traced(self.trace, rate, seconds)
        elif self.lengths == (TALK,):
            yield from conversations(rate, seconds, 7)
        else:
            for part, lengths in enumerate(self.lengths):
                yield from poisson(lengths, self.rate(share, instances, part), part_s, 7 + part, part * part_s)


def loads_of(trace: Path | None) -> list[Load]:
    return [
        Load("conversations", (TALK,), trace),
        Load("long prompts, short answers", (LONG,)),
        Load("short prompts, long answers", (SHORT,)),
        Load("turning", (LONG, SHORT, LONG, SHORT)),
    ]


# ------------------------------------------------------------------------------------------------------------ clusters


class Setup(NamedTuple):
    """What is compared."""

    name: str
    prefill: int
    decode: int
    unified: int = 0
    is_balanced: bool = False
    tpot_s: float | None = None
    """`slo.tpot_s`: with it D computes prompts, too, and pairs, D alone and unified instances are chosen by cost."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is a fixed split of pairs."""
        return not (self.unified or self.is_balanced)


def setups_of(instances: int) -> list[Setup]:
    half, third = instances // 2, instances // 3
    return [
        *(Setup(f"{n}P{instances - n}D", n, instances - n) for n in range(1, instances)),
        Setup("unified", 0, 0, instances, tpot_s=TPOT_S),
        Setup("mixed pool", third, third, instances - 2 * third, tpot_s=TPOT_S),
        Setup("balancer", half, instances - half, is_balanced=True),
    ]


@dataclass
class Result:
    setup: Setup
    requests: list[SimulatedRequest]
    seconds: float
    changes: list[tuple[float, Change]]

    @property
    def goodput(self) -> float:
        return sum(request.keeps(TTFT_S, TPOT_S) for request in self.requests) / self.seconds

    def quantile(self, get: Callable[[SimulatedRequest], float], share: float) -> float:
        values = sorted(get(request) for request in self.requests if request.is_whole)
        return values[min(len(values) - 1, int(len(values) * share))] if values else math.nan


class Balance:
    """The balancer over a simulated cluster, as `cluster/balancing.py` drives it."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._balancer = Balancer(TTFT_S, TPOT_S)
        self._joined_s: dict[int, float] = {}
        self.changes: list[tuple[float, Change]] = []

    def tick(self) -> None:
        cluster, now_s = self._cluster, self._cluster.clock.now_s
        flow, loads = cluster.router.flow(), cluster.loads()
        mean = flow.prompt_tokens / flow.requests if flow.requests else 1.0
        observed = [
            observe(
                one.info, loads[one.name], now_s - self._joined_s.setdefault(one.incarnation, now_s), mean
            )._replace(roles=SIDES)
            for one in cluster.members
            if one.name in loads
        ]
        change = self._balancer.tick(now_s, Fleet(observed, flow.offered, flow.begun, flow.waits_s))
        if change is not None:
            self.changes.append((now_s, change))
            cluster.change_role(change.instance, change.role)
        cluster.at(now_s + cluster.deadlines.heartbeat_interval_s, self.tick)


def simulate(load: Load, setup: Setup, share: float, instances: int, seconds: float) -> Result:
    requests: list[SimulatedRequest] = []
    admission = AdmissionConfig(max_queue_s=TTFT_S / 2)
    router = RouterConfig(slo=SLOConfig(ttft_s=TTFT_S, tpot_s=setup.tpot_s), admission=admission)
    cluster = SimulatedCluster(
        PROFILE, setup.prefill, setup.decode, setup.unified, router, SCHEDULER, on_end=requests.append
    )
    cluster.feed(load.arrivals(share, instances, seconds))
    balance = Balance(cluster)
    if setup.is_balanced:
        cluster.at(0.0, balance.tick)
    cluster.run()
    return Result(setup, requests, seconds, balance.changes)


# -------------------------------------------------------------------------------------------------------------- results


class Case(NamedTuple):
    load: Load
    setup: Setup
    share: float
    instances: int
    seconds: float


def run(case: Case) -> Result:
    logging.disable(logging.ERROR)
    return simulate(case.load, case.setup, case.share, case.instances, case.seconds)


def best_fixed(results: Mapping[Case, Result], case: Case) -> float:
    """Return the goodput of the best fixed split of pairs under the load of this case."""
    return max(
        (result.goodput for other, result in results.items() if other.setup.is_fixed and other[0::2] == case[0::2]),
        default=math.nan,
    )


def row_of(results: Mapping[Case, Result], case: Case) -> list[object]:
    result, best = results[case], best_fixed(results, case)
    return [
        *(case.load.name, case.setup.name, case.share, len(result.requests) / case.seconds, result.goodput),
        result.goodput / best if best else math.nan,
        *(result.quantile(lambda r: r.ttft_s, share) for share in (0.5, 0.99)),
        result.quantile(lambda r: r.tpot_s, 0.99),
        len(result.changes) if case.setup.is_balanced else "",
    ]


def plot(results: Mapping[Case, Result], loads: Sequence[Load], folder: Path) -> None:
    """Draw goodput over offered rate, one picture for each load."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    for load in loads:
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        of_load = {case: result for case, result in results.items() if case.load is load}
        for setup in dict.fromkeys(case.setup for case in of_load):
            points = sorted(
                (len(r.requests) / r.seconds, r.goodput) for case, r in of_load.items() if case.setup == setup
            )
            style = {"linewidth": 1, "linestyle": "--"} if setup.is_fixed else {"linewidth": 2, "marker": "o"}
            axes.plot(*zip(*points, strict=True), label=setup.name, **style)
        most = max(len(r.requests) / r.seconds for r in of_load.values())
        axes.plot([0, most], [0, most], color="grey", linewidth=0.7, linestyle=":")
        axes.set_title(load.name)
        axes.set_xlabel("requests a second")
        axes.set_ylabel(f"of these within {TTFT_S:g} s and {1000 * TPOT_S:g} ms a token")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"goodput-{load.name.split()[0].rstrip(',')}.png", dpi=90)
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.goodput", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, help="trace in the format of Mooncake")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=200.0, help="of each load; twice as many of one that turns")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--only", nargs="+", default=(), help="names of loads or clusters, or their beginnings")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--plot", type=Path, help="folder of the pictures, which need matplotlib")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    begin_s, only = time.monotonic(), tuple(args.only)

    def is_wanted(names: Sequence[str], name: str) -> bool:
        chosen = [each for each in only if any(other.startswith(each) for other in names)]
        return not chosen or any(name.startswith(each) for each in chosen)

    loads, setups = loads_of(args.trace), setups_of(args.instances)
    loads = [load for load in loads if is_wanted([each.name for each in loads], load.name)]
    setups = [setup for setup in setups if is_wanted([each.name for each in setups], setup.name)]
    cases = [
        Case(load, setup, share, args.instances, args.seconds * (2 if len(load.lengths) > 1 else 1))
        for load in loads
        for setup in setups
        for share in args.shares
    ]
    results: dict[Case, Result] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for case, result in zip(cases, pool.map(run, cases), strict=True):
            results[case] = result
            print(*row_of(results, case)[:5], file=sys.stderr, flush=True)
    publish("goodput", COLUMNS, [row_of(results, case) for case in cases], args.out)
    if args.plot is not None:
        plot(results, loads, args.plot)
    print(f"took {time.monotonic() - begin_s:.0f} s")
    is_right = True
    for case, result in results.items():
        if case.setup.is_balanced:
            turns, best = len(case.load.lengths), best_fixed(results, case)
            is_right &= result.goodput >= WANTED_RATIO * best and len(result.changes) <= turns * (case.instances - 2)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
