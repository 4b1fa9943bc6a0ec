"""An engine without torch whose tokens depend on every byte of KV in its pages: for tests and benchmarks of failures.

It starts in a fraction of a second, uses next to no CPU, and its KV crosses by the real transports. What a model does
with floats is done here with checksums: the KV of a token is a record of the token, its position, its region and the
checksum of all KV before it (so of its whole context), the "attention" of a step reads all of it from the pages, and
the next token is a function of what was read. A page that is missing, stale, of another request or in the wrong order
changes every token after it. `expected_tokens` says what is right, without pages.

`ChecksumExecutor` is called by the step thread alone. Invariant: it remembers no KV, only the token ids of a slot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import DoneStep, ExecutorInfo, LayerCallback, PrefillChunk, StepPlan, StepResult
from chitu.errors import Internal
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, aux_row_bytes
from chitu.messages import KVLayout, SamplingParams, unpack_i32

NUM_LAYERS = 2
NUM_REGIONS = 2 * NUM_LAYERS
RECORD_BYTES = 16
"""KV of one token in one region: `head_dim` 4 of float32, one head."""
FIRST_TOKEN = 16
"""Smaller ids are special ones of the tokenizer; they are never an answer."""
_POSITION = struct.Struct(f"<{4 * NUM_REGIONS}I")


def checksum_layout(page_size: int, vocab_size: int) -> KVLayout:
    return KVLayout("checksum", NUM_LAYERS, 1, RECORD_BYTES // 4, page_size, "float32", vocab_size)


def _records(token: int, position: int, context: int) -> bytes:
    """KV of one token in all regions; `context`: checksum of all KV before it."""
    return _POSITION.pack(*(value for region in range(NUM_REGIONS) for value in (token, position, context, region)))


def _next_token(context: int, num_emitted: int, sampling: SamplingParams | None, vocab_size: int) -> int:
    """The sampler: seeded where the temperature says so, by the position in the output as the real one."""
    salt = 0
    if sampling is not None and sampling.temperature > 0:
        salt = zlib.crc32(struct.pack("<QI", sampling.seed & (1 << 64) - 1, num_emitted))
    return FIRST_TOKEN + ((context ^ salt) * 0x9E3779B1 + 0x7F4A7C15 & 0xFFFFFFFF) % (vocab_size - FIRST_TOKEN)


def expected_tokens(
    prompt: Sequence[int], n: int, vocab_size: int, sampling: SamplingParams | None = None
) -> list[int]:
    """The first `n` tokens of the answer to a prompt, on any instance; greedy where no sampling is given."""
    context = 0
    for position, token in enumerate(prompt):
        context = zlib.crc32(_records(token, position, context), context)
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(_next_token(context, len(tokens), sampling, vocab_size))
        context = zlib.crc32(_records(tokens[-1], len(prompt) + len(tokens) - 1, context), context)
    return tokens


class Device(NamedTuple):
    type: str


class ChecksumPool:
    """Pages, aux rows and staging memory in one shared file, as `KVPool` lays them out; a `PagedMemory`."""

    device = Device("cpu")

    def __init__(self, layout: KVLayout, num_pages: int, num_aux_slots: int, staging_bytes: int = 0) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.num_aux_slots = num_aux_slots
        self.page_bytes = layout.page_size * RECORD_BYTES
        self.aux_row_bytes = aux_row_bytes(layout.vocab_size)
        region_bytes = num_pages * self.page_bytes
        staging_offset = NUM_REGIONS * region_bytes + num_aux_slots * self.aux_row_bytes
        self.arena_bytes = staging_offset + staging_bytes
        self.memfd = os.memfd_create("chitu-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.memfd, self.arena_bytes)
        self._map = mmap.mmap(self.memfd, self.arena_bytes)
        self.arena_base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region_bases = tuple(self.arena_base + r * region_bytes for r in range(NUM_REGIONS))
        self.aux_base = self.arena_base + NUM_REGIONS * region_bytes
        self.staging_base = self.arena_base + staging_offset
        arena = np.frombuffer(self._map, dtype=np.uint8)
        shape = (NUM_REGIONS, num_pages * layout.page_size, RECORD_BYTES)
        self.kv: NDArray[np.uint8] = arena[: NUM_REGIONS * region_bytes].reshape(shape)
        """`[region, page * page_size + offset, RECORD_BYTES]`"""
        self.aux_rows: NDArray[np.uint8] = arena[NUM_REGIONS * region_bytes : staging_offset].reshape(
            -1, self.aux_row_bytes
        )
        self.logits = self.aux_rows[:, AUX_HEADER_BYTES:].view(np.uint32)
        """In place of a row of logits: the checksum of the prompt's KV, and zeros."""

    def close(self) -> None:
        if self.memfd >= 0:
            os.close(self.memfd)
            self.memfd = -1


@dataclass(frozen=True, slots=True)
class Pace:
    """How long computing takes. The thread sleeps, so it costs no CPU."""

    step_s: float = 0.0
    prompt_token_s: float = 0.0


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    prompt_len: int
    kv_len: int
    sampling: SamplingParams | None
    rows: list[int] = field(default_factory=list)
    """Where the KV of each position lies; as many as its pages hold."""


class ChecksumExecutor:
    """See `engine.executor.Executor`. `hold("prefill")` is called ahead of the last of several chunks of a prompt."""

    def __init__(
        self,
        info: ExecutorInfo,
        pool: ChecksumPool,
        pace: Pace,
        hold: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._info = info
        self._pool = pool
        self._pace = pace
        self._hold = hold
        self._slots: dict[int, _Slot] = {}
        self._saved: dict[int, NDArray[np.uint8]] = {}

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def warmup(self) -> None:
        """Nothing to run once."""

    def forget(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    @property
    def saved_keys(self) -> frozenset[int]:
        return frozenset(self._saved)

    def close(self) -> None:
        self._pool.close()

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        return DoneStep(self.execute(plan, on_layer))

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        result = StepResult([], [])
        for offload in plan.offload:
            state = self._slots.pop(offload.slot)
            self._saved[offload.key] = self._pool.kv[:, state.rows[: state.kv_len]].copy()
        for slot in plan.release:
            del self._slots[slot]
        for key in plan.drop:
            del self._saved[key]
        for admit in plan.admit:
            tokens = unpack_i32(admit.token_ids).tolist()
            self._slots[admit.slot] = _Slot(tokens, admit.prompt_len, admit.kv_len, admit.sampling)
            self._take_pages(self._slots[admit.slot], admit.pages)
        for append in plan.append:
            self._take_pages(self._slots[append.slot], append.pages)
        for restore in plan.restore:
            state = self._slots[restore.slot]
            self._pool.kv[:, state.rows[: state.kv_len]] = self._saved.pop(restore.key)
        for first in plan.first_tokens:
            self._sample(first.slot, int(self._pool.logits[first.aux_slot, 0]), result)
        if plan.prefill:
            self._prefill(plan.prefill, on_layer, result)
        if plan.decode:
            time.sleep(self._pace.step_s)
        for slot in plan.decode:
            state = self._slots[slot]
            context = self._attention(state)
            records = _records(state.tokens[state.kv_len], state.kv_len, context)
            self._pool.kv[:, state.rows[state.kv_len]] = np.frombuffer(records, np.uint8).reshape(NUM_REGIONS, -1)
            state.kv_len += 1
            self._sample(slot, self._attention(state), result)
        return result

    def _take_pages(self, state: _Slot, pages: Sequence[int]) -> None:
        page_size = self._pool.layout.page_size
        state.rows += [page * page_size + offset for page in pages for offset in range(page_size)]

    def _attention(self, state: _Slot) -> int:
        """Checksum of all KV of a slot, as it lies in the pages now."""
        if state.kv_len > len(state.rows):
            raise Internal(f"KV of {state.kv_len} tokens in pages for {len(state.rows)}")
        return zlib.crc32(self._pool.kv[:, state.rows[: state.kv_len]].swapaxes(0, 1).tobytes())

    def _prefill(self, chunks: list[PrefillChunk], on_layer: LayerCallback | None, result: StepResult) -> None:
        contexts, kv = [], []
        for chunk in chunks:
            state = self._slots[chunk.slot]
            if chunk.start != state.kv_len:
                raise Internal(f"slot {chunk.slot}: chunk from {chunk.start}, its KV ends at {state.kv_len}")
            if chunk.start and chunk.start + chunk.length == len(state.tokens):
                self._hold("prefill")
            context, records = self._attention(state), []
            for position in range(chunk.start, chunk.start + chunk.length):
                records.append(_records(state.tokens[position], position, context))
                context = zlib.crc32(records[-1], context)
            contexts.append(context)
            kv.append(np.frombuffer(b"".join(records), np.uint8).reshape(chunk.length, NUM_REGIONS, RECORD_BYTES))
        pause_s = self._pace.prompt_token_s * sum(chunk.length for chunk in chunks) / NUM_LAYERS
        for layer in range(NUM_LAYERS):
            time.sleep(pause_s)
            for chunk, data in zip(chunks, kv, strict=True):
                rows = self._slots[chunk.slot].rows[chunk.start : chunk.start + chunk.length]
                for region in (2 * layer, 2 * layer + 1):
                    self._pool.kv[region, rows] = data[:, region]
            if on_layer is not None:
                on_layer(layer)
        for chunk, context in zip(chunks, contexts, strict=True):
            self._slots[chunk.slot].kv_len += chunk.length
            if chunk.aux_slot >= 0:
                self._pool.logits[chunk.aux_slot, 0] = context
            if chunk.sample:
                self._sample(chunk.slot, context, result)

    def _sample(self, slot: int, context: int, result: StepResult) -> None:
        state = self._slots[slot]
        num_emitted = len(state.tokens) - state.prompt_len
        token = _next_token(context, num_emitted, state.sampling, self._info.vocab_size)
        state.tokens.append(token)
        result.slots.append(slot)
        result.tokens.append(token)
