"""Tokens a second of a group of 1, 2, 4, 8 members that share experts: `python -m benchmark.scaling [--plot FILE.png]`.

Two processes first exchange small rows over gloo on this machine, as members do in each layer (`GroupLinks`):
all-gather and reduce-scatter, and all-to-all. The least times of the first two give the seconds of a call and of a
byte. For n members a layer is taken for n - 1 such hops of each call and n - 1 times the bytes, as on a ring. `--link`
sets another link than gloo.

Then the group serves a burst of requests in virtual time (`chitu/simulation`): the real router and schedulers, over an
engine whose steps take the seconds of `member_of`. Members read 1/n of the weights of the experts, and each waits for
the slowest in every step. Beside them stand as many instances that step alone and have all experts each.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chitu.config.schema import SchedulerConfig
from chitu.simulation.cluster import SimulatedCluster
from chitu.simulation.profile import EngineProfile, ExchangeCost, StepCost
from chitu.tools.bench.report import DEFAULT_DIR, publish

SIZES = (1, 2, 4, 8)
HIDDEN, EXPERTS_OF_ROW, LAYERS = 2048, 8, 24
ROW_BYTES = 4 * (2 * HIDDEN + 2 * EXPERTS_OF_ROW)
"""Bytes of a row on its way to another member and back (ADR 64)."""
ROWS = (1, 8, 64, 256)
REPEATS = 300
EXPERT_READ_S = 0.03
ENGINE = EngineProfile(
    StepCost(prefill_s=0.004, prompt_token_s=1e-4, decode_s=0.006 + EXPERT_READ_S, sequence_s=2e-4, turn_s=5e-4),
    name="made up",
    expert_share=0.6,
    max_running_requests=32,
)
"""A step of one row reads all weights in 36 ms, of which 30 ms are experts."""
SCHEDULER = SchedulerConfig(max_running_requests=32, max_batched_tokens=2048, chunk_size=512)
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256, 128
"""Of each member, all at once."""
COLUMNS = ("link", "members", "exchange of 32 rows ms", "tokens/s", "over one member", "over as many that step alone")


class Link(NamedTuple):
    """Seconds of the exchange among two."""

    name: str
    call_s: float
    byte_s: float

    def exchange(self, size: int) -> ExchangeCost:
        """Return what a step of so many members costs, with rows that are gathered."""
        hops = size - 1
        return ExchangeCost((2 * LAYERS + 1) * hops * self.call_s, LAYERS * hops * ROW_BYTES * self.byte_s)


FREE, FABRIC = Link("free", 0.0, 0.0), Link("20 us and 25 GB/s (stated)", 2e-5, 4e-11)


# ------------------------------------------------------------------------------------------------------------ measured


class Measured(NamedTuple):
    """Seconds of a call."""

    call: str
    rows: int
    nbytes: int
    least_s: float
    median_s: float


def _exchange(rank: int, folder: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from chitu.engine.expert_group import GroupLinks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    links, found = GroupLinks(group), []
    for rows in ROWS:
        there, back = torch.zeros(rows, HIDDEN + 2 * EXPERTS_OF_ROW), torch.zeros(2 * rows, HIDDEN)
        sends = (rows // 2, rows - rows // 2)  # of both
        calls = (
            ("all-gather", there.nbytes, functools.partial(links.all_gather, there)),
            ("reduce-scatter", back.nbytes // 2, functools.partial(links.reduce_scatter, back)),
            ("all-to-all", there.nbytes // 2, functools.partial(links.all_to_all, there, sends, (sends[rank],) * 2)),
        )
        for name, nbytes, call in calls:
            times_s = []
            for _ in range(REPEATS):
                begin_s = time.perf_counter()
                call()
                times_s.append(time.perf_counter() - begin_s)
            found.append(Measured(name, rows, nbytes, min(times_s), statistics.median(times_s)))
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def measure() -> list[Measured]:
    """Return what exchanges of two processes take on this machine."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_exchange, args=(rank, folder, answers)) for rank in range(2)]
        for process in processes:
            process.start()
        found: list[Measured] = answers.get(timeout=300)
        for process in processes:
            process.join()
    return found


def link_of(found: Sequence[Measured]) -> Link:
    """Return the line through the least times of the calls with which rows are gathered."""
    points = [(each.nbytes, each.least_s) for each in found if each.call != "all-to-all"]
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    least_s = min(seconds for _, seconds in points)
    return Link("gloo, two processes here", max(intercept, least_s), max(slope, 0.0))


# ----------------------------------------------------------------------------------------------------------- simulated


def member_of(size: int, link: Link) -> EngineProfile:
    """Return the engine of a member of a group of this size."""
    cost = msgspec.structs.replace(ENGINE.cost, decode_s=ENGINE.cost.decode_s - EXPERT_READ_S * (1 - 1 / size))
    return msgspec.structs.replace(ENGINE, cost=cost, dp_size=size, experts="spread", exchange=link.exchange(size))


def tokens_per_s(profile: EngineProfile, instances: int = 1) -> float:
    """Return the tokens a second of a burst that fills all members."""
    logging.disable(logging.ERROR)
    cluster = SimulatedCluster(profile, unified=instances, scheduler=SCHEDULER)
    count = REQUESTS * profile.dp_size * instances
    requests = [cluster.submit(0.0, PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(count)]
    cluster.run()
    return count * OUTPUT_TOKENS / max(request.end_s for request in requests)


def plot(curves: dict[str, list[float]], sizes: Sequence[int], path: Path) -> None:
    """Draw tokens a second over the number of members."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, values in curves.items():
        style = {"linestyle": ":", "color": "grey"} if name == "step alone" else {"marker": "o"}
        axes.plot(sizes, values, label=name, **style)
    axes.set_xticks(sizes)
    axes.set_xlabel("members")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.scaling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", metavar="CALL_S:BYTES_PER_S", help="in place of gloo on this machine: 2e-4:1e9")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--plot", type=Path, help="the picture, which needs matplotlib")
    parser.add_argument("--out", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args(argv)
    if args.link is None:
        found = measure()
        publish("exchange", Measured._fields, found, args.out)
        link = link_of(found)
    else:
        call_s, bytes_per_s = map(float, args.link.split(":"))
        link = Link("as given", call_s, 1 / bytes_per_s)
    alone = [tokens_per_s(msgspec.structs.replace(ENGINE, experts="cut"), size) for size in args.sizes]
    curves, rows = {}, []
    for each in (FREE, FABRIC, link):
        name = f"{each.name}: {1e6 * each.call_s:.0f} us, {1e-9 / each.byte_s:.2f} GB/s" if each is link else each.name
        curves[name] = [tokens_per_s(member_of(size, each)) for size in args.sizes]
        for size, value, beside in zip(args.sizes, curves[name], alone, strict=True):
            exchange = each.exchange(size)
            exchange_ms = 1e3 * (exchange.step_s + SCHEDULER.max_running_requests * exchange.row_s)
            rows.append((name, size, exchange_ms, value, value / curves[name][0], value / beside))
    publish("scaling", COLUMNS, rows, args.out)
    if args.plot is not None:
        plot({**curves, "step alone": alone}, args.sizes, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
