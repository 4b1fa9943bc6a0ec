"""An engine without torch whose tokens depend on every byte of KV in its pages: that of fake instances, and of tests
and benchmarks of failures.

It starts in a fraction of a second, uses almost no CPU, and its KV goes over the real transports. It is the fake
executor, which checks every plan, except that a token is the checksum of the KV that a step reads from the pages. So a
page that is missing, stale, of another request or in the wrong order changes every token after it. Only the step thread
calls `ChecksumExecutor`. Invariant: it keeps no KV, only the token ids of a slot.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import (
    Admit,
    CopyPage,
    ExecutorInfo,
    FirstToken,
    LayerCallback,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
    StepResult,
)
from chitu.fake.executor import (
    FAKE_STATE,
    NUM_REGIONS,
    RECORD_BYTES,
    STATE_ROW_BYTES,
    FakeExecutor,
    FakeSlot,
    kv_of,
)
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.kv_cache.pool import shared_memory
from chitu.protocol import KVLayout
from chitu.types import FAKE_MODEL, Ready

NUM_LAYERS = NUM_REGIONS // 2


def checksum_layout(
    page_size: int, vocab_size: int, *, has_state: bool = False, model_hash: str = FAKE_MODEL
) -> KVLayout:
    layout = KVLayout.uniform(model_hash, NUM_LAYERS, 1, RECORD_BYTES // 4, page_size, "float32", vocab_size)
    return msgspec.structs.replace(layout, state=FAKE_STATE) if has_state else layout


class ChecksumDevice(NamedTuple):
    type: str


class ChecksumPool:
    """A `PagedMemory` with pages, aux rows and space for transports in one shared file, laid out as in `KVPool`."""

    device = ChecksumDevice("cpu")

    def __init__(
        self, layout: KVLayout, num_pages: int, num_aux_slots: int, transfer_bytes: int = 0, num_state_slots: int = 0
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.num_aux_slots = num_aux_slots
        self.page_bytes = layout.page_bytes
        self.aux_row_bytes = aux_row_bytes(layout.vocab_size)
        region_bytes = num_pages * layout.page_size * RECORD_BYTES
        state_offset = NUM_REGIONS * region_bytes + num_aux_slots * self.aux_row_bytes
        self.num_state_slots = num_state_slots if layout.state else 0
        self.state_row_bytes = STATE_ROW_BYTES if layout.state else 0
        transfer_offset = state_offset + self.num_state_slots * self.state_row_bytes
        self.arena_bytes = transfer_offset + transfer_bytes
        mapping = shared_memory("chitu-kv", self.arena_bytes, "the KV cache")
        self.arena_base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.region_bases = tuple(self.arena_base + r * region_bytes for r in range(NUM_REGIONS))
        self.aux_base = self.arena_base + NUM_REGIONS * region_bytes
        self.state_base = self.arena_base + state_offset
        self.transfer_base = self.arena_base + transfer_offset
        arena = np.frombuffer(mapping, dtype=np.uint8)
        shape = (NUM_REGIONS, num_pages * layout.page_size, RECORD_BYTES)
        self.kv: NDArray[np.uint8] = arena[: NUM_REGIONS * region_bytes].reshape(shape)
        """KV of shape `[region, page * page_size + offset, RECORD_BYTES]`."""
        self.state_rows: NDArray[np.uint8] = arena[state_offset:transfer_offset].reshape(-1, STATE_ROW_BYTES)
        self.aux_rows: NDArray[np.uint8] = arena[NUM_REGIONS * region_bytes : state_offset].reshape(
            -1, self.aux_row_bytes
        )
        """Aux rows: instead of logits, the checksum of the prompt's KV, and zeros."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Simulated computing times. The thread sleeps, so they cost no CPU."""

    step_s: float = 0.0
    prompt_token_s: float = 0.0


class ChecksumExecutor(FakeExecutor):
    """`FakeExecutor` with KV as real bytes in a pool, and with computing times. The KV in the pages determines the
    token. `hold("prefill")` is called before the last of several chunks of a prompt."""

    def __init__(
        self,
        info: ExecutorInfo,
        pool: ChecksumPool,
        pace: Pace,
        hold: Callable[[str], None] = lambda what: None,
    ) -> None:
        super().__init__(info, pool.num_pages, pool.layout.page_size, pool.aux_rows, pool.state_rows)
        self._pool = pool
        self._pace = pace
        self._hold = hold
        self._host: dict[int, NDArray[np.uint8]] = {}
        self._begins: dict[int, int] = {}
        """Start of the first chunk by slot, after the cached tokens."""
        self._computed: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        """Rows of this step's chunks, and their KV `[tokens, regions, RECORD_BYTES]`."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        for key in plan.drop:
            self._host.pop(key, None)
        if plan.decode:
            time.sleep(self._pace.step_s)
        pause_s = self._pace.prompt_token_s * sum(chunk.length for chunk in plan.prefill) / NUM_LAYERS

        def compute(layer: int, ready: Ready | None = None, first_layer: int | None = None) -> None:
            time.sleep(pause_s)
            for rows, kv in self._computed:
                for region in (2 * layer, 2 * layer + 1):
                    self._pool.kv[region, rows] = kv[:, region]
            if on_layer is not None:
                on_layer(layer)

        self._computed = []
        return super().execute(plan, compute)

    def _admit(self, admit: Admit) -> None:
        super()._admit(admit)
        self._begins[admit.slot] = admit.kv_len

    def _find_wrong_state(self, slot: int, state: FakeSlot, found: int) -> None:
        """Let it change every token."""
        state.wrong = found | 1

    def _holds(self, pages: Sequence[int], tokens: list[int], adapter: int = 0) -> bool:
        """Accept any pages, since they may come from another process. Their contents show in the tokens."""
        return True

    def _rows(self, state: FakeSlot, end: int) -> NDArray[np.int64]:
        """Return the rows of the KV of its first `end` tokens."""
        pages = np.array(state.pages[: -(-end // self.page_size)], np.int64) * self.page_size
        return np.add.outer(pages, np.arange(self.page_size)).ravel()[:end]

    def _attention(self, state: FakeSlot, end: int) -> int:
        """Return the checksum of the KV of its first `end` tokens, as it is in the pages now."""
        return zlib.crc32(self._pool.kv[:, self._rows(state, end)].swapaxes(0, 1).tobytes())

    def _input(self, slot: int, position: int) -> tuple[int, int]:
        """Return the token that is computed at a position, and the position that it is rotated to."""
        return self._slots[slot].tokens[position], position

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        state, end = self._live(chunk.slot, "prefill"), chunk.start + chunk.length
        self._require_pages(chunk.slot, state, end)
        if chunk.start > self._begins[chunk.slot] and end == len(state.tokens):
            self._hold("prefill")
        found, records = self._attention(state, chunk.start), []
        for position in range(chunk.start, end):
            records.append(kv_of(*self._input(chunk.slot, position), found ^ state.adapter ^ self.weights))
            found = zlib.crc32(records[-1], found)
        kv = np.frombuffer(b"".join(records), np.uint8).reshape(chunk.length, NUM_REGIONS, RECORD_BYTES)
        self._computed.append((self._rows(state, end)[chunk.start :], kv))
        if end == len(state.tokens):
            state.state = found
        super()._prefill(chunk, result)

    def _first_token(self, first: FirstToken, result: StepResult) -> None:
        # Take the state from the row, which was transferred as bytes, too.
        self._live(first.slot, "first token").state = self.logits(first.aux_slot)
        super()._first_token(first, result)

    def _decode(self, slot: int, result: StepResult) -> None:
        state = self._live(slot, "decode")
        length = state.kv_len
        self._require_pages(slot, state, length + 1)
        found = self._attention(state, length) ^ state.adapter ^ self.weights
        record = kv_of(*self._input(slot, length), found)
        self._pool.kv[:, self._rows(state, length + 1)[-1]] = np.frombuffer(record, np.uint8).reshape(NUM_REGIONS, -1)
        state.state = self._attention(state, length + 1)
        super()._decode(slot, result)

    def _draft(self, slot: int, tokens: tuple[int, ...]) -> None:
        super()._draft(slot, tokens)
        state = self._live(slot, "draft")
        rows = self._rows(state, state.kv_len + 1 + len(tokens))[state.kv_len + 1 :]
        for row, token in zip(rows, tokens, strict=True):
            record = kv_of(token, -1 & 0xFFFFFFFF, 0)
            self._pool.kv[:, row] = np.frombuffer(record, np.uint8).reshape(NUM_REGIONS, -1)

    def _copy(self, copy: CopyPage) -> None:
        super()._copy(copy)
        rows = np.arange(self.page_size)
        kv, source = self._pool.kv, copy.source * self.page_size + rows
        kv[:, copy.target * self.page_size + rows] = kv[:, source]

    def _offload(self, offload: Offload) -> None:
        state = self._live(offload.slot, "offload")
        self._host[offload.key] = self._pool.kv[:, self._rows(state, state.kv_len)].copy()
        super()._offload(offload)

    def _restore(self, restore: Restore) -> None:
        super()._restore(restore)
        state = self._live(restore.slot, "restore")
        self._pool.kv[:, self._rows(state, state.kv_len)] = self._host.pop(restore.key)
