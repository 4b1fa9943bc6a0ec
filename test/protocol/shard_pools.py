"""Fake pools of the TP ranks of a P or a D: KV heads split as in the real pools, in numpy, with known contents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
from support.fake_transport import FakeFabric, FakeTransport

from chitu.config.tensor_parallel import kv_heads_of
from chitu.kv_cache.state_row import STAMP_BYTES, StateRow, StateStamp, digest_of, lines_of
from chitu.kv_cache.state_sums import HostStateSeals
from chitu.kv_transfer.layout import rank_memory
from chitu.protocol import PROTOCOL_VERSION, CacheGroup, KVArgsRegisterInfo, KVLayout, StateTensor

NUM_LAYERS, PAGE_SIZE, HEAD_DIM, NUM_PAGES = 2, 4, 2, 12
HEAD_BYTES = PAGE_SIZE * HEAD_DIM * 4
AUX_ROW_BYTES, NUM_AUX = 64 + 64, 2
EMPTY = -1
NUM_STATES = 3
STATE = (
    StateTensor(0, "sum", "float32", (16, 3)),
    StateTensor(1, "window", "bfloat16", (64, 5), (16, 16, 32)),
)
"""A matrix, and the inputs of a convolution: keys, keys and values of twice the width."""
COPIED_STATE = (
    StateTensor(0, "sum", "float32", (16, 3)),
    StateTensor(1, "window", "bfloat16", (56, 5), (32, 16, 8), (4, 2, 1)),
)
"""The same for a Mamba of four heads whose second block has two groups and whose third has one, which ranks copy."""
PROMPT = bytes(range(40))
"""Ten tokens, of which the states are."""


def layout_of(num_kv_heads: int, tp_size: int, state: tuple[StateTensor, ...] = ()) -> KVLayout:
    layout = KVLayout.uniform("m", NUM_LAYERS, num_kv_heads, HEAD_DIM, PAGE_SIZE, "float32", 16, tp_size)
    return msgspec.structs.replace(layout, state=state)


def mixed_layout(tp_size: int) -> KVLayout:
    """Return a layout of layers that differ: in heads, in the widths of K and V, one without KV, and one with a latent
    row and an index key."""
    groups = (
        CacheGroup((0, 4), 4, (2, 2)),
        CacheGroup((1,), 2, (4, 2), window=8),
        CacheGroup((3,), 1, (6, 2)),
    )
    return KVLayout("m", PAGE_SIZE, "float32", 16, groups, tp_size)


class RankPool:
    """`PagedMemory` of one rank; `kv`: by region, int32 `[pages, heads, elements of a head]`; `states`: uint8 `[state
    slots, row bytes]`."""

    def __init__(self, layout: KVLayout, tp_rank: int, is_target: bool) -> None:
        self.layout = layout
        self.heads = [kv_heads_of(region.num_kv_heads, layout.tp_size, tp_rank) for region in layout.regions]
        """By region."""
        self.page_bytes = layout.page_bytes
        self.num_pages = NUM_PAGES
        self.aux_row_bytes = AUX_ROW_BYTES
        self.num_aux_slots = 0 if tp_rank else NUM_AUX
        *starts, aux_at = accumulate((NUM_PAGES * nbytes for nbytes in self.page_bytes), initial=0)
        state_at = aux_at + self.num_aux_slots * AUX_ROW_BYTES
        self.tp_rank, self.row = tp_rank, StateRow.of(layout)
        self.state_row_bytes, self.num_state_slots = self.row.row_bytes, NUM_STATES if layout.state else 0
        state_bytes = self.num_state_slots * self.state_row_bytes
        self.arena = np.full(state_at + state_bytes, 0xFF, dtype=np.uint8)
        self.arena_base, self.arena_bytes = int(self.arena.ctypes.data), self.arena.nbytes
        self.region_bases = tuple(self.arena_base + start for start in starts)
        self.aux_base = self.arena_base + aux_at
        self.kv = [
            self.arena[start : start + NUM_PAGES * nbytes].view(np.int32).reshape(NUM_PAGES, len(heads), -1)
            for start, nbytes, heads in zip(starts, self.page_bytes, self.heads, strict=True)
        ]
        self.state_base = self.arena_base + state_at
        self.rows = self.arena[aux_at:state_at].reshape(self.num_aux_slots, AUX_ROW_BYTES)
        self.states = self.arena[state_at:].reshape(self.num_state_slots, self.state_row_bytes)
        rows = layout, tp_rank, self.state_base, self.num_state_slots
        self.seals = HostStateSeals(*rows, counts_copies=is_target) if layout.state else None

    def fill(self) -> None:
        """Fill with what the model would compute: a function of region, page, head and element."""
        for region, kv in enumerate(self.kv):
            for page in range(NUM_PAGES):
                kv[page] = self.expected(region, page)
        for slot in range(self.num_state_slots):
            stamp = StateStamp(len(PROMPT) // 4, digest_of(PROMPT)).pack()
            self.states[slot, : len(stamp)] = np.frombuffer(stamp, np.uint8)
            self.states[slot, STAMP_BYTES:] = self.expected_state(slot)[STAMP_BYTES:]

    def expected_state(self, slot: int) -> np.ndarray:
        """Return what a row has: a function of slot, tensor, line and byte, and 255 where there is nothing."""
        row = np.full(self.state_row_bytes, 0xFF, dtype=np.uint8)
        for index, part in enumerate(self.row.parts):
            lines = [n for block in lines_of(part.tensor, self.layout.tp_size, self.tp_rank) for n in block]
            data = [(slot * 101 + index * 59 + n * 7 + np.arange(part.line_bytes)) % 251 for n in lines]
            row[part.offset : part.offset + part.nbytes] = np.concatenate(data)
        return row

    def expected(self, region: int, page: int) -> list[np.ndarray]:
        """Return what a page has once it is filled, or written from one of this number, by head."""
        elements = np.arange(self.kv[region].shape[-1], dtype=np.int32)
        return [((region * NUM_PAGES + page) * 64 + head) * 64 + elements for head in self.heads[region]]


class Ranks:
    """The ranks of one instance: a pool and a transport each."""

    def __init__(self, fabric: FakeFabric, name: str, layout: KVLayout) -> None:
        """`name`: "p", or "d", whose seals count copies."""
        self.layout = layout
        self.pools = [RankPool(layout, rank, name == "d") for rank in range(layout.tp_size)]
        self.transports = [FakeTransport(fabric, f"{name}.{rank}") for rank in range(layout.tp_size)]
        for pool, transport in zip(self.pools, self.transports, strict=True):
            transport.register(pool.arena_base, pool.arena_bytes)

    def registration(self, incarnation: int = 7) -> KVArgsRegisterInfo:
        """Return the registration as P receives it, after encoding and decoding."""
        ranks = tuple(
            rank_memory(pool, rank, [transport.local_session()])
            for rank, (pool, transport) in enumerate(zip(self.pools, self.transports, strict=True))
        )
        info = KVArgsRegisterInfo(PROTOCOL_VERSION, 0, incarnation, "h", 1, self.layout, ranks)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=KVArgsRegisterInfo)

    def check(self, dst_pages: Sequence[int], src_pages: Sequence[int], layers: range) -> None:
        """Check that exactly these pages of these layers hold what P had, and that nothing else was touched."""
        came_from = dict(zip(dst_pages, src_pages, strict=True))
        for pool in self.pools:
            for index, region in enumerate(self.layout.regions):
                for page in range(NUM_PAGES):
                    found = pool.kv[index][page]
                    if page in came_from and region.layer in layers:
                        assert (found == pool.expected(index, came_from[page])).all()
                    else:
                        assert (found == EMPTY).all()
