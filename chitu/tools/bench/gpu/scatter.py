"""Writes of KV pages into another process's pool, by each transport of this machine, directly and staged. Compared with
a scattered copy within one process, and with the same transport writing one piece.

The parent writes. A child owns the target pool, scatters staged pages, and returns checksums of its pages, which the
parent compares. Memory, transports and segments are made as in an instance. A transport whose library is not installed
is reported and left out.
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

from chitu.config.schema import InstanceConfig, PDDisaggregationConfig, RouterConfig
from chitu.config.staging import plan_staging
from chitu.errors import ChituError, MissingDependency
from chitu.known_types import known
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.shard_writer import pair_regions, plan_page_copies
from chitu.kv_transfer.transports.local import open_transports, register_memory, wrap_transports
from chitu.kv_transfer.transports.segments import StagedPeer
from chitu.kv_transfer.transports.staged import StagedTransport
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle, Transport, reaches_pages
from chitu.protocol import KVLayout, RankMemory, TransportSession, encode
from chitu.tools.bench.gpu.card import PAGE_SIZE, Card, Row, at_least
from chitu.tools.bench.transfer import INCARNATION, PipeMessages, answer_page_sums, lines_of, page_sums
from chitu.types import Role

AIM = 0.8
TIMEOUT_S = 30.0
SLOW_REPEATS = 5
"""Repeats for transports that take a tenth of a second or more."""
KINDS = ("cuda_ipc", "shm", "mooncake", "nixl")
ON_CPU = KINDS[1:]


@dataclass(slots=True)
class LinkEnd:
    """One of the two processes: its pool, transport and segments."""

    pool: KVPool
    sessions: tuple[TransportSession, ...]
    transport: Transport


def open_end(card: Card, kind: str, role: Role) -> LinkEnd:
    """Open one end as in a 1P1D on this device. A CPU does not need staging, so it is forced there. Raise
    MissingDependency if the transport's library is missing."""
    model = card.sizes.model
    layout = KVLayout.uniform(
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
    pool = KVPool(layout, card.sizes.pool_pages, 1, str(card.device), transfer_bytes=pool_bytes)
    opened = open_transports(config, "127.0.0.1", str(card.device))
    transports = wrap_transports(opened, router, role, 0, instance, pool)
    return LinkEnd(pool, register_memory(pool, transports), transports[0])


def receive(card: Card, kind: str) -> None:
    """Run the child: register a pool, and answer each line of page numbers with their sums."""
    end = open_end(card, kind, Role.DECODE)
    print(encode(rank_memory(end.pool, 0, end.sessions)).hex(), flush=True)
    lines = lines_of(end.transport, sys.stdin) if isinstance(end.transport, StagedTransport) else iter(sys.stdin)
    answer_page_sums(end.pool, lines)
    end.transport.close()


def rows(card: Card, child_arguments: list[str]) -> Iterator[Row | str]:
    """Yield the rows of each transport, or a text if it could not be measured. `child_arguments` is the command line of
    a child with the same sizes; `--receive KIND` is added."""
    for kind in KINDS if card.is_gpu else ON_CPU:
        try:
            end = open_end(card, kind, Role.PREFILL)
            for region in end.pool.regions:
                region.normal_()
            card.synchronize()
            command = [sys.executable, "-m", "chitu.tools.bench.gpu", *child_arguments, "--receive", kind]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdin is not None and child.stdout is not None
                yield from _rows_of(card, end, child.stdin, child.stdout)
            end.transport.close()
            del end
        except MissingDependency as error:
            print(f"without {kind}: {error.message}", flush=True)
        except (ChituError, RuntimeError, OSError, ValueError) as error:
            yield f"transfer by {kind}: {type(error).__name__}: {error}"
        card.release()


def _rows_of(card: Card, end: LinkEnd, to_child: IO[str], from_child: IO[str]) -> Iterator[Row]:
    memory = msgspec.msgpack.decode(bytes.fromhex(from_child.readline()), type=known(RankMemory))
    transport, pool = end.transport, end.pool
    pipe = PipeMessages(transport, to_child, from_child)
    peer = transport.connect(memory, memory.sessions[0])
    inner, inner_peer, staged = transport, peer, False
    if isinstance(transport, StagedTransport) and isinstance(peer, StagedPeer):
        transport.bind(peer, INCARNATION)
        inner, inner_peer, staged = transport.inner, peer.inner, peer.segments is not None
        peer.must_stage = staged
    rng, layers = random.Random(5), card.sizes.model.layers
    is_fast = transport.name == "cuda_ipc" or not card.is_gpu
    repeats = card.sizes.repeats if is_fast else SLOW_REPEATS
    raw_rate = _rate_of_one_piece(transport, peer, pool, repeats) if staged else 0.0
    for count in card.sizes.transfer_pages:
        own, theirs = (rng.sample(range(card.sizes.pool_pages), count) for _ in range(2))
        nbytes = pool.layout.bytes_per_page * count
        ways: dict[str, Callable[[], None]] = {}
        pairs, layout = pair_regions(pool, memory), pool.layout
        whole = plan_page_copies(pairs, own, theirs, layout.regions_of(range(layers)))
        if reaches_pages(inner_peer):
            by_layer = [plan_page_copies(pairs, own, theirs, layout.regions_of(range(i, i + 1))) for i in range(layers)]
            ways["one write"] = _writes(inner, inner_peer, [whole])
            if is_fast:
                ways["a write a layer"] = _writes(inner, inner_peer, by_layer)
        if staged:
            ways["staged"] = _writes(transport, peer, [whole])
        for way, body in ways.items():
            rate = nbytes / card.wall_seconds(body, repeats)
            what = f"{transport.name}: {count} pages, {way} ({nbytes / 2**20:.3g} MiB)"
            if transport.name == "cuda_ipc" or raw_rate == 0:
                is_aimed = way == "one write" and count == max(card.sizes.transfer_pages)
                ratio = rate / card.ceilings.scattered_bytes_per_s
                yield at_least(what, rate / 1e9, "GB/s", ratio, "scattered copy", AIM if is_aimed else None)
            else:
                yield at_least(what, rate / 1e9, "GB/s", rate / raw_rate, "one piece by it", None)
            _check(end, own, theirs, pipe)
    transport.disconnect(peer)
    pipe.close()


def _writes(transport: Transport, peer: PeerHandle, lists: list[CopyList]) -> Callable[[], None]:
    def body() -> None:
        for copies in lists:
            transport.write(peer, copies, TIMEOUT_S)

    return body


def _rate_of_one_piece(transport: Transport, peer: PeerHandle, pool: KVPool, repeats: int) -> float:
    """Return bytes a second of a write of one whole segment from this end's send buffer."""
    assert isinstance(transport, StagedTransport) and isinstance(peer, StagedPeer) and peer.segments is not None
    area = transport.end.gatherer.area
    source = area.address(0) if area is not None else pool.arena_base
    nbytes = min(peer.segments.group_bytes, pool.arena_bytes)
    copies = CopyList((source,), (peer.segments.base,), (nbytes,))
    times = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        transport.inner.write(peer.inner, copies, TIMEOUT_S)
        times.append(time.perf_counter() - start_s)
    return nbytes / statistics.median(times[1:])


def _check(end: LinkEnd, own: list[int], theirs: list[int], pipe: PipeMessages) -> None:
    if pipe.page_sums(theirs) != page_sums(end.pool, own):
        raise RuntimeError(f"{end.transport.name}: the peer found other bytes in {len(own)} pages than were written")
    # Change the bytes, so that the next check cannot pass with those of this write.
    for region in end.pool.regions:
        region[own[0]].add_(1)
