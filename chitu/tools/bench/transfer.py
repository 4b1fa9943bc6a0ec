"""`chitu bench transfer`: transports between two real processes against memcpy of the same bytes.

The parent writes into a child's pool. Every round runs memcpy and each transport one after the other over the same
source bytes, so that the noise of the machine affects all of them. Reported are the best time of each and the median
over the rounds of the ratios. `--transfer` adds ways for the pages of a prompt: `staged` (gathered into segments, sent
as few large pieces, scattered by the child, whose messages are lines on its pipe; checksums of the pages are compared
at the end) and `auto`, where the engine's table of thresholds chooses for every write. `raw` is the same transport
writing as many bytes in one piece. memcpy moves as many bytes in one piece between two arenas of the same kind (memfd)
inside the parent; every page of all arenas is touched first. Block cases walk through the arenas, so that from 1 MiB on
no block is in a core's cache, as with pages of a KV cache. A time is the mean over one walk.
"""

from __future__ import annotations

import argparse
import ctypes
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from chitu.errors import MissingDependency
from chitu.known_types import known
from chitu.kv_cache.checksum import page_sums_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.shard_writer import pair_regions, plan_page_copies
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.nixl import NixlTransport
from chitu.kv_transfer.transports.segments import HostCopier, Scatterer, area_of
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd, staged_from
from chitu.kv_transfer.transports.transport import CopyList, MessagingTransport, Transport
from chitu.protocol import KVLayout, RankMemory, encode
from chitu.tools.bench.report import DEFAULT_DIR, publish

PREFIX = "message "
RANK, INCARNATION = 0, 1
"""Rank and incarnation of the other process, for both sides."""
LAYOUT = KVLayout.uniform(
    "bench", num_layers=32, num_kv_heads=2, head_dim=128, page_size=16, dtype="float32", vocab_size=32000
)
NUM_PAGES, NUM_AUX_SLOTS = 128, 2
"""Size of the pool: with pages of 16 KiB an arena of 128 MiB."""
TIMEOUT_S = 30.0
KINDS = ("shm", "mooncake", "nixl")
SEGMENT_BYTES, NUM_SEGMENTS = 8 << 20, 4
PROMPT_PAGES = 64
BLOCKS = [1 << power for power in range(12, 27, 2)]
WALK_STEPS = 32
WAYS = ("direct", "staged", "auto")


class PipeMessages:
    """The parent's end of the pipes. Lines that are not messages wait for `line`."""

    def __init__(self, transport: Transport, to_child: IO[str], from_child: IO[str]) -> None:
        self._transport = transport
        self._to_child = to_child
        self._from_child = from_child
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        if isinstance(transport, MessagingTransport):
            transport.attach(self.send)
        self._reader = threading.Thread(target=self._read, name="messages", daemon=True)
        self._reader.start()

    def say(self, line: str) -> None:
        with self._lock:
            self._to_child.write(line + "\n")
            self._to_child.flush()

    def send(self, incarnation: int, payload: bytes) -> None:
        self.say(PREFIX + payload.hex())

    def line(self) -> str:
        return self._lines.get()

    def page_sums(self, pages: Sequence[int]) -> list[int]:
        """Return the checksum of each of these pages of the child."""
        self.say(msgspec.json.encode(list(pages)).decode())
        return msgspec.json.decode(self.line(), type=list[int])

    def close(self) -> None:
        """Close the pipes. The child ends at the end of its input."""
        self._to_child.close()
        self._reader.join()
        self._from_child.close()

    def _read(self) -> None:
        for line in self._from_child:
            if line.startswith(PREFIX) and isinstance(self._transport, MessagingTransport):
                self._transport.on_message(RANK, INCARNATION, bytes.fromhex(line.removeprefix(PREFIX)))
            else:
                self._lines.put(line)


def page_sums(pool: KVPool, pages: Sequence[int]) -> list[int]:
    """Return the checksum of each page, over K and V of all layers."""
    sums: list[int] = page_sums_of(pool, 0).sums(range(pool.layout.num_layers), pages).tolist()
    return sums


def answer_page_sums(pool: KVPool, lines: Iterable[str]) -> None:
    for line in lines:
        print(msgspec.json.encode(page_sums(pool, msgspec.json.decode(line, type=list[int]))).decode(), flush=True)


def lines_of(transport: StagedTransport, source: IO[str]) -> Iterator[str]:
    """Handle the messages at the child's end and yield all other lines."""
    transport.attach(lambda incarnation, payload: print(PREFIX + payload.hex(), flush=True))
    for line in source:
        if line.startswith(PREFIX):
            transport.on_message(RANK, INCARNATION, bytes.fromhex(line.removeprefix(PREFIX)))
            transport.scatter_one()
        else:
            yield line


class Case(msgspec.Struct, frozen=True):
    """Copy lists of equal size, written one after the other. `offsets[i]` is the offset of the same memcpy in its
    arenas.

    For a prompt, `own` pages go to `theirs` in `num_layers` layers, and `raw` moves as many bytes in one piece."""

    name: str
    walk: list[CopyList]
    offsets: list[int]
    own: Sequence[int] = ()
    theirs: Sequence[int] = ()
    num_layers: int = 0
    raw: CopyList | None = None


def new_pool() -> KVPool:
    pool = KVPool(LAYOUT, NUM_PAGES, NUM_AUX_SLOTS, transfer_bytes=NUM_SEGMENTS * SEGMENT_BYTES)
    ctypes.memset(pool.arena_base, 1, pool.arena_bytes)
    return pool


def randomise(pool: KVPool) -> None:
    """Fill the pool with random numbers, so that no two pages are equal."""
    for region in pool.regions:
        region.uniform_()


def new_transport(kind: str, pool: KVPool, is_receiver: bool) -> StagedTransport:
    inner: Transport
    if kind == "nixl":
        inner = NixlTransport("127.0.0.1")
    else:
        inner = ShmTransport() if kind == "shm" else MooncakeTransport("127.0.0.1")
    area, copier = area_of(pool, pool.transfer_base, SEGMENT_BYTES, NUM_SEGMENTS), HostCopier()
    scatterer = Scatterer(pool, area, copier, [0]) if is_receiver else None
    transport = StagedTransport(inner, StagingEnd("staged", pool, copier, area, scatterer=scatterer))
    transport.register(pool.arena_base, pool.arena_bytes)
    return transport


def receive(kind: str) -> None:
    """Run the child with a registered pool and segments: scatter, and answer lists of pages by their checksums."""
    pool = new_pool()
    transport = new_transport(kind, pool, is_receiver=True)
    print(encode(rank_memory(pool, 0, [transport.local_session()])).hex(), flush=True)
    answer_page_sums(pool, lines_of(transport, sys.stdin))
    transport.close()


class BenchLink:
    """A transport of the parent, and the child at its other end."""

    def __init__(self, kind: str, pool: KVPool) -> None:
        self.kind = kind
        self.transport = new_transport(kind, pool, is_receiver=False)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "chitu.tools.bench.transfer", "--receive", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self._child.stdout.readline()), type=known(RankMemory))
        self.messages = PipeMessages(self.transport, self._child.stdin, self._child.stdout)
        self.peer = self.transport.connect(self.memory, self.memory.sessions[0])
        self.transport.bind(self.peer, INCARNATION)
        whole = CopyList([pool.arena_base], [self.memory.arena_base], [pool.arena_bytes])
        self.transport.inner.write(self.peer.inner, whole, TIMEOUT_S)
        self.threshold = staged_from(kind, "cpu")
        self.num_staged = self.num_chosen = 0
        """Number of writes with `auto`, and of those that it staged."""

    def write(self, case: Case, way: str) -> None:
        """Write all copy lists of the case."""
        is_staged = way == "staged"
        num_pieces, nbytes = len(case.walk[0].src), case.walk[0].nbytes
        if way == "auto":
            is_staged = self.threshold.is_met(num_pieces, nbytes)
            self.num_staged, self.num_chosen = self.num_staged + is_staged, self.num_chosen + 1
        for copies in case.walk:
            if is_staged:
                self.transport.write(self.peer, copies, TIMEOUT_S)
            else:
                self.transport.inner.write(self.peer.inner, copies, TIMEOUT_S)

    def write_raw(self, case: Case) -> None:
        assert case.raw is not None
        self.transport.inner.write(self.peer.inner, case.raw, TIMEOUT_S)

    def close(self) -> None:
        self.transport.disconnect(self.peer)
        self.transport.close()
        self.messages.close()
        self._child.wait()


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
            copies = plan_page_copies(pair_regions(pool, memory), src_pages, dst_pages, LAYOUT.regions_of(layers))
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
