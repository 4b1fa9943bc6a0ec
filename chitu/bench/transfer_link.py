"""The processes of `chitu bench transfer`: the child with a pool (`receive`), and the parent's `BenchLink` to it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from chitu.bench.staged_link import INCARNATION, PipeMessages, answer_page_sums, lines_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.nixl import NixlTransport
from chitu.kv_transfer.transports.segments import HostCopier, Scatterer, area_of
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.staged import StagedTransport, StagingEnd, staged_from
from chitu.kv_transfer.transports.transport import CopyList, Transport
from chitu.protocol import KVLayout, RankMemory, encode

LAYOUT = KVLayout("bench", num_layers=32, num_kv_heads=2, head_dim=128, page_size=16, dtype="float32", vocab_size=32000)
NUM_PAGES, NUM_AUX_SLOTS = 128, 2
"""Size of the pool: with pages of 16 KiB an arena of 128 MiB."""
TIMEOUT_S = 30.0
KINDS = ("shm", "mooncake", "nixl")
SEGMENT_BYTES, NUM_SEGMENTS = 8 << 20, 4


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
            [sys.executable, "-m", "chitu.bench.transfer", "--receive", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self.memory = msgspec.msgpack.decode(bytes.fromhex(self._child.stdout.readline()), type=RankMemory)
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
