"""`python -m chitu.bench.transfer`: transports between two real processes against memcpy of the same bytes.

The parent writes into a child's pool. Every round runs memcpy and each transport one after the other over the same
source bytes, so that the noise of the machine hits all of them; reported are the best time of each and the median of
the ratios of a round. memcpy moves as many bytes in one piece between two arenas of the same kind (memfd) inside the
parent; every page of all arenas is touched first. Block cases walk through the arenas, so that from 1 MiB on neither
side finds its block in a core's cache, as with pages of a KV cache; a time is the mean over one walk.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from chitu.bench.report import DEFAULT_DIR, publish
from chitu.errors import MissingDependency
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.mooncake.transfer_engine import MooncakeTransport
from chitu.kv_transfer.plan import plan_page_copies
from chitu.kv_transfer.shm.transfer_engine import ShmTransport
from chitu.kv_transfer.transport import CopyList, PeerHandle, Transport
from chitu.messages import KVLayout, RankMemory, encode

LAYOUT = KVLayout("bench", num_layers=32, num_kv_heads=2, head_dim=128, page_size=16, dtype="float32", vocab_size=32000)
NUM_PAGES, NUM_AUX_SLOTS = 128, 2
"""Pages of 16 KiB: an arena of 128 MiB."""
PROMPT_PAGES = 64
BLOCKS = [1 << power for power in range(12, 27, 2)]
WALK_STEPS = 32
TIMEOUT_S = 30.0


class Case(msgspec.Struct, frozen=True):
    """Copy lists of equal size, written one after the other; `offsets[i]`: where memcpy does the same in its arenas."""

    name: str
    walk: list[CopyList]
    offsets: list[int]


class Result(msgspec.Struct, frozen=True):
    case: str
    transport: str
    nbytes: int
    entries: int
    best_us: float
    best_gb_per_s: float
    memcpy_best_us: float
    fraction_of_memcpy: float
    """Median over the rounds of memcpy's time over the transport's."""
    fraction_of_memcpy_best: float


def new_pool() -> KVPool:
    pool = KVPool(LAYOUT, NUM_PAGES, NUM_AUX_SLOTS)
    ctypes.memset(pool.arena_base, 1, pool.arena_bytes)
    return pool


def new_transport(kind: str) -> Transport:
    return ShmTransport() if kind == "shm" else MooncakeTransport("127.0.0.1")


def receive(kind: str) -> None:
    """The child: a registered pool until stdin ends."""
    pool, transport = new_pool(), new_transport(kind)
    transport.register(pool.arena_base, pool.arena_bytes)
    print(encode(rank_memory(pool, 0, [transport.local_session()])).hex(), flush=True)
    sys.stdin.read()
    transport.close()


class Link:
    """A transport of the parent with its child."""

    def __init__(self, kind: str, pool: KVPool) -> None:
        self.kind = kind
        self.transport = new_transport(kind)
        self.transport.register(pool.arena_base, pool.arena_bytes)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "chitu.bench.transfer", "--receive", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self._child.stdout.readline()), type=RankMemory)
        self.peer: PeerHandle = self.transport.connect(self.memory, self.memory.sessions[0])
        whole = CopyList([pool.arena_base], [self.memory.arena_base], [pool.arena_bytes])
        self.transport.write(self.peer, whole, TIMEOUT_S)

    def close(self) -> None:
        self.transport.disconnect(self.peer)
        self.transport.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


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
            made.append(Case(f"{PROMPT_PAGES} {text} pages x {len(layers)} layers", [copies], [0]))
    return made


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def measure(links: list[Link], pool: KVPool, other: KVPool, rounds: int) -> list[Result]:
    """All cases over all links, interleaved with memcpy."""
    results = []
    lists = {link.kind: cases(pool, link.memory) for link in links}
    for index, case in enumerate(lists[links[0].kind]):
        nbytes = case.walk[0].nbytes
        memcpy_s: list[float] = []
        times_s: dict[str, list[float]] = {link.kind: [] for link in links}

        def copy(offsets: list[int] = case.offsets, size: int = nbytes) -> None:
            for offset in offsets:
                ctypes.memmove(other.arena_base + offset, pool.arena_base + offset, size)

        for _ in range(rounds):
            memcpy_s.append(_seconds(copy) / len(case.walk))
            for link in links:

                def write(link: Link = link, walk: list[CopyList] = lists[link.kind][index].walk) -> None:
                    for copies in walk:
                        link.transport.write(link.peer, copies, TIMEOUT_S)

                times_s[link.kind].append(_seconds(write) / len(case.walk))
        for kind, seconds in times_s.items():
            ratios = [reference / own for reference, own in zip(memcpy_s, seconds, strict=True)]
            best_s = min(seconds)
            results.append(
                Result(
                    case=case.name,
                    transport=kind,
                    nbytes=nbytes,
                    entries=len(case.walk[0].src),
                    best_us=round(best_s * 1e6, 1),
                    best_gb_per_s=round(nbytes / best_s / 1e9, 3),
                    memcpy_best_us=round(min(memcpy_s) * 1e6, 1),
                    fraction_of_memcpy=round(statistics.median(ratios), 3),
                    fraction_of_memcpy_best=round(min(memcpy_s) / best_s, 3),
                )
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json-dir", type=Path, default=DEFAULT_DIR, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.receive)
        return
    pool, other = new_pool(), new_pool()
    links = [Link("shm", pool)]
    try:
        links.append(Link("mooncake", pool))
    except MissingDependency as error:
        print(f"without mooncake: {error}")
    results = measure(links, pool, other, arguments.rounds)
    for link in links:
        link.close()
    columns = Result.__struct_fields__
    publish(
        "transfer", columns, [[getattr(result, name) for name in columns] for result in results], arguments.json_dir
    )


if __name__ == "__main__":
    main()
