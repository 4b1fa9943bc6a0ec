"""`python -m chitu.bench.transfer`: transports between two real processes against memcpy of the same bytes.

The parent writes into a child's pool. Every round runs memcpy and each transport one after the other over the same
source bytes, so that the noise of the machine affects all of them. Reported are the best time of each and the median
over the rounds of the ratios. `--transfer` adds ways for the pages of a prompt: `staged` (gathered into segments, sent
as few large pieces, scattered by the child; checksums of the pages are compared at the end) and `auto`, where the
engine's table of thresholds chooses for every write. `raw` is the same transport writing as many bytes in one piece.
memcpy moves as many bytes in one piece between two arenas of the same kind (memfd) inside the parent; every page of all
arenas is touched first. Block cases walk through the arenas, so that from 1 MiB on no block is in a core's cache, as
with pages of a KV cache. A time is the mean over one walk.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from chitu.bench.report import DEFAULT_DIR, publish
from chitu.bench.staged_link import page_sums
from chitu.bench.transfer_link import (
    KINDS,
    LAYOUT,
    NUM_PAGES,
    BenchLink,
    Case,
    new_pool,
    randomise,
    receive,
)
from chitu.errors import MissingDependency
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.shard_writer import plan_page_copies
from chitu.kv_transfer.transports.transport import CopyList
from chitu.protocol import RankMemory

PROMPT_PAGES = 64
BLOCKS = [1 << power for power in range(12, 27, 2)]
WALK_STEPS = 32
WAYS = ("direct", "staged", "auto")


class TransferResult(msgspec.Struct, frozen=True):
    case: str
    transport: str
    way: str
    nbytes: int
    entries: int
    best_us: float
    best_gb_per_s: float
    memcpy_best_us: float
    fraction_of_memcpy: float
    """Median over the rounds of memcpy's time divided by the transport's."""
    fraction_of_memcpy_best: float
    fraction_of_raw: float | None = None
    """Median over the rounds of the time of `raw` divided by this one's; None except for a prompt's pages."""


def cases(pool: KVPool, memory: RankMemory) -> list[Case]:
    made = []
    for size in BLOCKS:
        steps = min(WALK_STEPS, pool.arena_bytes // size)
        offsets = [step * (pool.arena_bytes // steps // 4096 * 4096) for step in range(steps)]
        walk = [CopyList([pool.arena_base + at], [memory.arena_base + at], [size]) for at in offsets]
        made.append(Case(f"block {size >> 10} KiB", walk, offsets))
    rng = random.Random(0)
    first, second = (rng.sample(range(NUM_PAGES), PROMPT_PAGES) for _ in range(2))
    run, shifted = range(PROMPT_PAGES), range(9, 9 + PROMPT_PAGES)
    for text, src_pages, dst_pages in (("contiguous", run, shifted), ("scattered", first, second)):
        for layers in (range(1), range(LAYOUT.num_layers)):
            copies = plan_page_copies(pool, memory, src_pages, dst_pages, layers)
            name = f"{PROMPT_PAGES} {text} pages x {len(layers)} layers"
            raw = CopyList([pool.arena_base], [memory.arena_base], [copies.nbytes])
            made.append(Case(name, [copies], [0], src_pages, dst_pages, len(layers), raw))
    return made


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


@dataclass(slots=True)
class Times:
    """Seconds of each round, by operation."""

    memcpy: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)


def measure(
    links: list[BenchLink], pool: KVPool, other: KVPool, rounds: int, ways: Sequence[str]
) -> list[TransferResult]:
    """Measure all cases over all links and ways, interleaved with memcpy."""
    results = []
    lists = {link.kind: cases(pool, link.memory) for link in links}
    for index, first in enumerate(lists[links[0].kind]):
        is_prompt = first.raw is not None
        times = {(link.kind, way): Times() for link in links for way in (ways if is_prompt else ("direct",))}
        for _ in range(rounds):
            memcpy_s = _seconds(partial(copy_in_memory, first, pool, other)) / len(first.walk)
            for link in links:
                case = lists[link.kind][index]
                raw_s = _seconds(partial(link.write_raw, case)) if is_prompt else 0.0
                for (kind, way), found in times.items():
                    if kind == link.kind:
                        write_s = _seconds(partial(link.write, case, way))
                        found.memcpy.append(memcpy_s)
                        found.raw.append(raw_s)
                        found.write.append(write_s / len(case.walk))
        for link in links:
            case = lists[link.kind][index]
            if is_prompt:
                check_pages(link, case, pool)
            results += [result_of(case, kind, way, found) for (kind, way), found in times.items() if kind == link.kind]
    return results


def copy_in_memory(case: Case, pool: KVPool, other: KVPool) -> None:
    """Copy as many bytes with memcpy, in one piece for each step."""
    for offset in case.offsets:
        ctypes.memmove(other.arena_base + offset, pool.arena_base + offset, case.walk[0].nbytes)


def check_pages(link: BenchLink, case: Case, pool: KVPool) -> None:
    """Raise RuntimeError if the child's pages are not the parent's. The last write was staged or direct."""
    if case.num_layers == LAYOUT.num_layers and link.messages.page_sums(case.theirs) != page_sums(pool, case.own):
        raise RuntimeError(f"{link.kind}: the peer found other bytes in {len(case.own)} pages than were written")


def result_of(case: Case, kind: str, way: str, times: Times) -> TransferResult:
    best_s = min(times.write)
    nbytes = case.walk[0].nbytes

    def ratio(reference_s: list[float]) -> float:
        return round(statistics.median(a / b for a, b in zip(reference_s, times.write, strict=True)), 3)

    return TransferResult(
        case=case.name,
        transport=kind,
        way=way,
        nbytes=nbytes,
        entries=len(case.walk[0].src),
        best_us=round(best_s * 1e6, 1),
        best_gb_per_s=round(nbytes / best_s / 1e9, 3),
        memcpy_best_us=round(min(times.memcpy) * 1e6, 1),
        fraction_of_memcpy=ratio(times.memcpy),
        fraction_of_memcpy_best=round(min(times.memcpy) / best_s, 3),
        fraction_of_raw=ratio(times.raw) if case.raw is not None else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transfer", default=",".join(WAYS), help=f"of {', '.join(WAYS)}, comma separated")
    parser.add_argument("--transports", default="shm,mooncake", help=f"of {', '.join(KINDS)}, comma separated")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.receive)
        return
    ways, kinds = arguments.transfer.split(","), arguments.transports.split(",")
    if unknown := (set(ways) - set(WAYS)) | (set(kinds) - set(KINDS)):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(WAYS)} and {', '.join(KINDS)}")
    pool, other = new_pool(), new_pool()
    randomise(pool)
    links = []
    for kind in kinds:
        try:
            links.append(BenchLink(kind, pool))
        except MissingDependency as error:
            print(f"without {kind}: {error}")
    if not links:
        parser.error("none of these transports works here")
    results = measure(links, pool, other, arguments.rounds, ways)
    for link in links:
        if link.num_chosen:
            print(f"{link.kind}: auto staged {link.num_staged} of {link.num_chosen} writes; {link.threshold}")
        link.close()
    columns = TransferResult.__struct_fields__
    publish(
        "transfer", columns, [[getattr(result, name) for name in columns] for result in results], arguments.json_dir
    )


if __name__ == "__main__":
    main()
