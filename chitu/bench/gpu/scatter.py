"""KV pages into another process's pool, by each transport that this machine has, directly and staged, against what a
scattered copy within one process reaches, and against the same transport writing one piece.

The parent writes, a child owns the target pool, scatters what was staged, and says at the end whether the right bytes
are in the right pages. Memory, transports and segments are made as an instance makes them. A library that is not
installed is named and left out.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import msgspec
import torch

from chitu.bench.gpu.card import PAGE_SIZE, Card, Row, at_least
from chitu.bench.staged_link import StagedLink, serve_line
from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig
from chitu.config.staging import plan_staging
from chitu.errors import ChituError, MissingDependency
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.plan import plan_page_copies
from chitu.kv_transfer.register_memory import register_memory
from chitu.kv_transfer.staging.build import StagingParts, build_staging
from chitu.kv_transfer.transports.select import open_transports
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, reaches_pages
from chitu.protocol import KVLayout, RankMemory, TransportSession, encode
from chitu.types import Role

AIM = 0.8
TIMEOUT_S = 30.0
SLOW_REPEATS = 5
"""Of transports that take a tenth of a second and more."""
KINDS = ("cuda_ipc", "shm", "mooncake", "nixl")
ON_CPU = KINDS[1:]


@dataclass(slots=True)
class LinkEnd:
    """One of the two processes: its pool, transport and segments."""

    pool: KVPool
    transport: Transport
    sessions: tuple[TransportSession, ...]
    parts: StagingParts | None

    def close(self) -> None:
        self.transport.close()
        if self.parts is not None:
            self.parts.close()
        self.pool.close()


def open_end(card: Card, kind: str, role: Role) -> LinkEnd:
    """As a 1P1D on this device has it; on a CPU, where nothing needs it, staging is asked for. MissingDependency."""
    model = card.sizes.model
    layout = KVLayout(
        "bench", model.layers, model.kv_heads, model.resolved_head_dim, PAGE_SIZE, card.sizes.dtype, model.vocab_size
    )
    instance = InstanceConfig(devices=(str(card.device),))
    config = PDDisaggregationConfig(
        transport=kind,  # type: ignore[arg-type]
        transfer="auto" if card.is_gpu else "staged",
        staging_segment_mb=16 if card.is_gpu else 1,
        staging_mb=128 if card.is_gpu else 2,
    )
    router = RouterConfig(prefill_schedulers=(instance,), decode_schedulers=(instance,), pd_disaggregation=config)
    plan = plan_staging(router, role, instance)
    pool_bytes = plan.pool_bytes if plan is not None else 0
    pool = KVPool(layout, card.sizes.pool_pages, 1, str(card.device), staging_bytes=pool_bytes)
    parts = build_staging(router, role, instance, pool)
    transports = open_transports(config, "127.0.0.1", str(card.device))
    sessions = register_memory(pool, transports, parts.staging.area if parts is not None else None)
    if parts is not None:
        parts.pin(sessions)
    return LinkEnd(pool, transports[0], sessions, parts)


def page_sums(pool: KVPool, pages: list[int]) -> list[int]:
    """One number a page, over K and V of all layers, in which also the order of the regions counts."""
    index = torch.tensor(pages, device=pool.device)
    total = torch.zeros(len(pages), dtype=torch.int64, device=pool.device)
    for number, region in enumerate(region for pair in zip(pool.k, pool.v, strict=True) for region in pair):
        total += (2 * number + 1) * region[index].flatten(1).view(torch.int32).sum(1)
    sums: list[int] = total.tolist()
    return sums


def receive(card: Card, kind: str) -> None:
    """The child: a registered pool. A line of pages is answered by their sums, an order to scatter when it is done."""
    end = open_end(card, kind, Role.DECODE)
    memory = rank_memory(end.pool, 0, end.sessions)
    area = end.parts.staging.area if end.parts is not None else None
    if area is not None:
        memory = msgspec.structs.replace(memory, staging=area.memory())
    print(encode(memory).hex(), flush=True)
    for line in sys.stdin:
        if line.startswith("["):
            print(
                msgspec.json.encode(page_sums(end.pool, msgspec.json.decode(line, type=list[int]))).decode(), flush=True
            )
        else:
            assert area is not None and end.parts is not None
            print(serve_line(line, end.pool, area, end.parts.staging.copier), flush=True)
    end.close()


def rows(card: Card, child_arguments: list[str]) -> Iterator[Row | str]:
    """`child_arguments`: the command line of a child with the same sizes; `--receive KIND` is added. A text for a
    transport that could not be measured."""
    for kind in KINDS if card.is_gpu else ON_CPU:
        try:
            end = open_end(card, kind, Role.PREFILL)
            for region in end.pool.regions:
                region.normal_()
            card.synchronize()
            command = [sys.executable, "-m", "chitu.bench.gpu", *child_arguments, "--receive", kind]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdin is not None and child.stdout is not None
                yield from _rows_of(card, end, child.stdin, child.stdout)
                child.stdin.close()
            end.close()
            del end
        except MissingDependency as error:
            print(f"without {kind}: {error.message}", flush=True)
        except (ChituError, RuntimeError, OSError, ValueError) as error:
            yield f"transfer by {kind}: {type(error).__name__}: {error}"
        card.release()


def _rows_of(card: Card, end: LinkEnd, to_child: IO[str], from_child: IO[str]) -> Iterator[Row]:
    memory = msgspec.msgpack.decode(bytes.fromhex(from_child.readline()), type=RankMemory)
    transport, pool = end.transport, end.pool
    peer = transport.connect(memory, memory.sessions[0])
    rng, layers = random.Random(5), card.sizes.model.layers
    is_fast = transport.name == "cuda_ipc" or not card.is_gpu
    repeats = card.sizes.repeats if is_fast else SLOW_REPEATS
    staged: StagedLink | None = None
    raw_rate = 0.0
    if end.parts is not None and memory.staging is not None:
        area, copier = end.parts.staging.area, end.parts.staging.copier
        staged = StagedLink(pool, memory, transport, peer, copier, area, to_child, from_child)
        raw_rate = _rate_of_one_piece(end, memory, peer, repeats)
    for count in card.sizes.transfer_pages:
        own, theirs = (rng.sample(range(card.sizes.pool_pages), count) for _ in range(2))
        nbytes = 2 * pool.page_bytes * count * layers
        ways: dict[str, Callable[[], None]] = {}
        if reaches_pages(peer):
            whole = plan_page_copies(pool, memory, own, theirs, range(layers))
            by_layer = [plan_page_copies(pool, memory, own, theirs, range(i, i + 1)) for i in range(layers)]
            ways["one write"] = _writes(transport, peer, [whole])
            if is_fast:
                ways["a write a layer"] = _writes(transport, peer, by_layer)
        if staged is not None:
            ways["staged"] = _staged(staged, own, theirs, layers)
        for way, body in ways.items():
            rate = nbytes / card.wall_seconds(body, repeats)
            what = f"{transport.name}: {count} pages, {way} ({nbytes / 2**20:.3g} MiB)"
            if transport.name == "cuda_ipc" or raw_rate == 0:
                is_aimed = way == "one write" and count == max(card.sizes.transfer_pages)
                ratio = rate / card.ceilings.scattered_bytes_per_s
                yield at_least(what, rate / 1e9, "GB/s", ratio, "scattered copy", AIM if is_aimed else None)
            else:
                yield at_least(what, rate / 1e9, "GB/s", rate / raw_rate, "one piece by it", None)
            _check(end, own, theirs, to_child, from_child)
    transport.disconnect(peer)


def _writes(transport: Transport, peer: PeerHandle, lists: list[CopyList]) -> Callable[[], None]:
    def body() -> None:
        for copies in lists:
            transport.write(peer, copies, TIMEOUT_S)

    return body


def _staged(link: StagedLink, own: list[int], theirs: list[int], layers: int) -> Callable[[], None]:
    return lambda: link.write(own, theirs, layers)


def _rate_of_one_piece(end: LinkEnd, memory: RankMemory, peer: PeerHandle, repeats: int) -> float:
    """Bytes a second of a write of a whole segment from where this end sends from."""
    assert memory.staging is not None and end.parts is not None
    area = end.parts.staging.area
    source = area.address(0) if area is not None else end.pool.arena_base
    nbytes = min(memory.staging.segment_bytes, end.pool.arena_bytes)
    copies = CopyList((source,), (memory.staging.base,), (nbytes,))
    times = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        end.transport.write(peer, copies, TIMEOUT_S)
        times.append(time.perf_counter() - start_s)
    return nbytes / statistics.median(times[1:])


def _check(end: LinkEnd, own: list[int], theirs: list[int], to_child: IO[str], from_child: IO[str]) -> None:
    to_child.write(msgspec.json.encode(theirs).decode() + "\n")
    to_child.flush()
    if msgspec.json.decode(from_child.readline()) != page_sums(end.pool, own):
        raise RuntimeError(f"{end.transport.name}: the peer found other bytes in {len(own)} pages than were written")
    # What comes next has to bring its own bytes, or the check would see those of this one.
    for region in end.pool.regions:
        region[own[0]].add_(1)
