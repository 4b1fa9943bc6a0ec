"""The way from P's logits to D's token, hop by hop, with stamps from both processes (`hop_process.py`).

Requests go one by one to 1P1D on one card. D's token is the one that it draws from the row; P may have shown it before.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.tools.bench.gpu.card import Card, Row
from chitu.tools.bench.gpu.hop_process import FOLDER
from chitu.tools.bench.gpu.served import PROMPT_IDS, topology_overrides
from chitu.tools.bench.token_times import token_times_s

WARM_REQUESTS = 3
HOPS = (
    ("P", "rows", "P's step is read, and its row announced to the thread that sends"),
    ("P", "seal", "that thread has the row"),
    ("P", "sealed", "the row is sealed"),
    ("P", "written", "and written to D"),
    ("P", "left", "the message for D has left the thread"),
    ("D", "frame", "D's communication thread has a message"),
    ("D", "draw", "D's step thread begins to draw"),
    ("D", "drawn", "the draw is launched"),
    ("D", "read", "the token is on the host"),
    ("D", "emit", "and is taken"),
    ("D", "flushed", "the token has left D"),
)
"""Process and stamp at the end of each hop. The first one begins when P's step is read."""


class Stamps(NamedTuple):
    """Times of one name in one process, ascending."""

    times_ns: list[int]

    def next(self, since_ns: int) -> int:
        """Return the first time that is not before this. Raises LookupError if there is none."""
        at = bisect_left(self.times_ns, since_ns)
        if at == len(self.times_ns):
            raise LookupError("a hop has no stamp")
        return self.times_ns[at]

    def last(self, until_ns: int) -> int:
        """Return the last time that is not behind this. Raises LookupError if there is none."""
        at = bisect_right(self.times_ns, until_ns)
        if not at:
            raise LookupError("a hop has no stamp")
        return self.times_ns[at - 1]


def rows(card: Card, model: Path) -> Iterator[Row]:
    """Yield the median of each hop, and of all together."""
    found: dict[int, list[tuple[int, int]]] = {}
    topology = load_topology("pd_disagg_1p1d_local.yaml", topology_overrides(card, model, "pd_disagg_1p1d_local.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        entries = Entries(scheduler="chitu.tools.bench.gpu.hop_process", torchrun=False)
        with LocalCluster(topology, entries=entries, env={FOLDER: folder}) as cluster:
            cluster.wait_ready(300)
            for length in card.sizes.served_prompts:
                found[length] = list(_asked(cluster.url, length, card.sizes.served_rounds))
        processes = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    stamps = sorted_stamps(processes)
    for length, requests in found.items():
        hops = [hops_of(stamps, begin_ns, end_ns) for begin_ns, end_ns in requests[WARM_REQUESTS:]]
        for (_, _, what), times_ns in zip(HOPS, zip(*hops, strict=True), strict=True):
            yield Row(f"hop, {length} tokens: {what}", statistics.median(times_ns) / 1e6, "ms")
        yield Row(f"hops, {length} tokens: P's logits to D's token", statistics.median(map(sum, hops)) / 1e6, "ms")


def _asked(url: str, length: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Yield the times between which each request was served."""
    rng = random.Random(length)
    for _ in range(WARM_REQUESTS + rounds):
        begin_ns = time.monotonic_ns()
        token_times_s(url, [rng.randrange(*PROMPT_IDS) for _ in range(length)], 2)
        yield begin_ns, time.monotonic_ns()


def sorted_stamps(processes: Sequence[Sequence[tuple[str, int]]]) -> dict[tuple[str, str], Stamps]:
    """Return the stamps by process and name. Who has sent rows is P."""
    found: dict[tuple[str, str], list[int]] = {}
    for stamps in processes:
        side = "P" if any(name == "rows" for name, _ in stamps) else "D"
        for name, at_ns in stamps:
            found.setdefault((side, name), []).append(at_ns)
    return {key: Stamps(sorted(times_ns)) for key, times_ns in found.items()}


def hops_of(stamps: dict[tuple[str, str], Stamps], begin_ns: int, end_ns: int) -> list[int]:
    """Return the ns of each hop of a request that was served between these times. Raises LookupError if a stamp is
    missing."""
    at_ns = stamps["P", "read"].last(stamps["P", "rows"].next(begin_ns))
    if at_ns < begin_ns:
        raise LookupError("P has sent a row before it has read a step")
    hops = []
    for side, name, _ in HOPS:
        found_ns = stamps[side, name].next(at_ns)
        hops.append(found_ns - at_ns)
        at_ns = found_ns
    if stamps["D", "draw"].last(at_ns) > end_ns:
        raise LookupError("a request has the stamps of another")
    return hops
