"""Executors without tensors: one that checks every plan, one whose KV is real bytes, and one whose steps run late."""

from __future__ import annotations

import ctypes
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import (
    MAX_UNREAD_STEPS,
    Admit,
    AppendPages,
    CopyPage,
    CopyState,
    DoneStep,
    ExecutorInfo,
    FirstToken,
    KeepState,
    LayerCallback,
    Offload,
    PrefillChunk,
    Restore,
    StepPlan,
    StepResult,
)
from chitu.errors import Internal
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, HostRows, aux_row_bytes
from chitu.kv_cache.pool import shared_memory
from chitu.kv_cache.state_row import STAMP_BYTES, StateStamp, digest_of
from chitu.protocol import KVLayout, SamplingParams, StateTensor, pack_i32, pack_logprobs, unpack_i32
from chitu.types import Ready

# ----------------------------------------------------------------------------------------------------------------------
# An executor without tensors, for the scheduler's tests and benchmarks. Only the step thread calls it. The next token
# of a slot is a checksum of the KV of all tokens it holds, so a token lost, doubled or put in the wrong order by
# admission, retraction or hand-over changes every token after it; `expected_tokens` is the oracle. Every record of a
# plan is checked against the needs of a real executor (pages, KV, slots), and an impossible plan raises
# `InvariantViolation` with the values. It keeps no KV (`ChecksumExecutor` does), only which sequence uses which page
# and which tokens' KV was computed into it: several slots may use a page, and then none may write to it. It keeps the
# logits rows: `aux` takes writable memory, in which a row has the state of the checksum, so that a transport can carry
# it from P to D.


NUM_REGIONS = 4
RECORD_BYTES = 16
"""Bytes of the KV of one token in one region."""
FIRST_TOKEN = 16
"""Smallest id of an answer; smaller ones are special tokens of a tokenizer."""
_KV = struct.Struct("<3I")
_REGIONS = [region.to_bytes(4, "little") for region in range(NUM_REGIONS)]
FAKE_STATE = (StateTensor(0, "sum", "float32", (4, 4)),)
"""State of these executors' layouts, if they have one: the checksum of the KV of the tokens taken in, in each word."""
STATE_ROW_BYTES = STAMP_BYTES + 64
_ROW = struct.Struct("<4sI")
_ROW_MARK = b"FAKE"


class InvariantViolation(Internal):
    """No executor could run the plan: a bug of the scheduler that made it."""


def kv_of(token: int, position: int, state: int) -> bytes:
    """Return the KV of one token in all regions, `RECORD_BYTES` each. `state` is the checksum of all KV before it."""
    head = _KV.pack(token, position, state)
    return head + _REGIONS[0] + head + _REGIONS[1] + head + _REGIONS[2] + head + _REGIONS[3]


def _state_of(tokens: Sequence[int], adapter: int, state: int = 0, position: int = 0) -> int:
    """Return the checksum of the KV of these tokens after the tokens of `state`. Each adapter has its own KV."""
    for at, token in enumerate(tokens, position):
        state = zlib.crc32(kv_of(token, at, state ^ adapter), state)
    return state


def _next_token(state: int, num_emitted: int, sampling: SamplingParams, vocab_size: int) -> int:
    """Return the next token. It is never an eos id: the test decides when requests end (max_tokens, stop ids). A
    sampled token depends on the seed and on its position in the output, as the sampler's do."""
    salt = sampling.seed + num_emitted * 0x85EBCA6B & 0xFFFFFFFF if sampling.temperature > 0 else 0
    return FIRST_TOKEN + ((state ^ salt) * 0x9E3779B1 + 0x7F4A7C15 & 0xFFFFFFFF) % (vocab_size - FIRST_TOKEN)


def expected_tokens(
    prompt: Sequence[int], n: int, vocab_size: int, sampling: SamplingParams | None = None, adapter: int = 0
) -> list[int]:
    """Return the first `n` tokens that a request with this prompt gets, on any instance; greedy if `sampling` is
    None."""
    sampling = sampling or SamplingParams(max_tokens=max(1, n), temperature=0.0)
    state, tokens = _state_of(prompt, adapter), list[int]()
    for num_emitted in range(n):
        tokens.append(_next_token(state, num_emitted, sampling, vocab_size))
        state = _state_of(tokens[-1:], adapter, state, len(prompt) + num_emitted)
    return tokens


def fake_logprobs(token: int, count: int) -> bytes:
    """Return this executor's logprobs of a token, from which the token can be recognised."""
    return pack_logprobs(-float(token), [(token + rank, -float(rank)) for rank in range(count)])


@dataclass(slots=True)
class _FakeSlot:
    tokens: list[int]
    prompt_len: int
    state: int
    """Checksum of the KV of `tokens`."""
    kv_len: int
    pages: list[int]
    sampling: SamplingParams | None
    lacks_restore: bool
    """Whether it was admitted with KV that is not in its pages and was not restored yet."""
    adapter: int
    state_slot: int = -1
    taken: int = 0
    """Checksum that its state row must have."""
    wrong: int = 0
    """Difference that a wrong state makes to every token."""


@dataclass(slots=True, frozen=True)
class _Saved:
    """Host copy of a retracted sequence's KV."""

    kv_len: int
    state: int
    """Checksum of the tokens whose KV is saved."""
    row: NDArray[np.uint8] | None
    """Its state row."""


class FakeExecutor:
    """Executor without tensors. `aux_rows` is memory `[aux slots, bytes]`, `state_rows` memory `[state slots, bytes]`
    of rows of `FAKE_STATE`; by default there are none."""

    weights = 0
    """Stands for the weights of the model. KV of `ChecksumExecutor` depends on them, as on the adapter: `adapter` of
    `expected_tokens` is both."""

    checked_to = AUX_HEADER_BYTES + 64
    """End of what the checksum of a row covers."""

    def __init__(
        self,
        info: ExecutorInfo,
        num_pages: int,
        page_size: int,
        aux_rows: NDArray[np.uint8] | None = None,
        state_rows: NDArray[np.uint8] | None = None,
    ) -> None:
        self.info = info
        self.num_pages = num_pages
        self.page_size = page_size
        self._aux_rows = np.zeros((0, 128), np.uint8) if aux_rows is None else aux_rows
        self._state_rows = np.zeros((0, STATE_ROW_BYTES), np.uint8) if state_rows is None else state_rows
        self._slots: dict[int, _FakeSlot] = {}
        self._users: dict[int, list[int]] = {}
        """Slots that use each page."""
        self._saved: dict[int, _Saved] = {}
        self._held: dict[int, tuple[int, list[int], int]] = {}
        """Adapter and tokens of each page, and the end of those whose KV is in this page (and was in those before)."""
        self.steps = 0
        self.closed = False

    @property
    def live_slots(self) -> frozenset[int]:
        return frozenset(self._slots)

    @property
    def owned_pages(self) -> frozenset[int]:
        return frozenset(self._users)

    @property
    def saved_keys(self) -> frozenset[int]:
        return frozenset(self._saved)

    def state_row(self, state_slot: int) -> memoryview:
        """Return the writable bytes of one state row."""
        return memoryview(self._state_rows[state_slot])

    def aux_row(self, aux_slot: int) -> memoryview:
        """Return the writable bytes of one row, which a transport copies."""
        _check(0 <= aux_slot < len(self._aux_rows), f"aux slot {aux_slot} of {len(self._aux_rows)}")
        return memoryview(self._aux_rows[aux_slot])

    def logits(self, aux_slot: int) -> int:
        """Return the checksum in a row, which stands for logits."""
        mark, checksum = _ROW.unpack_from(self.aux_row(aux_slot), AUX_HEADER_BYTES)
        _check(mark == _ROW_MARK, f"aux slot {aux_slot} holds no logits")
        return int(checksum)

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        return DoneStep(self.execute(plan, on_layer))

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        _check(not self.closed, "a step after close")
        self.steps += 1
        result = StepResult([], [], rows={})
        for offload in plan.offload:
            self._offload(offload)
        for slot in plan.release:
            self._release(slot)
        for key in plan.drop:
            _check(self._saved.pop(key, None) is not None, f"drop of key {key}, under which nothing is saved")
        for admit in plan.admit:
            self._admit(admit)
        for append in plan.append:
            self._append(append)
        for copy in plan.copy:
            self._copy(copy)
        for copy_state in plan.copy_state:
            self._copy_state(copy_state)
        for keep in plan.keep_state:
            self._keep_state(keep)
        for restore in plan.restore:
            self._restore(restore)
        for first in plan.first_tokens:
            self._first_token(first, result)
        for chunk in plan.prefill:
            self._prefill(chunk, result)
        if plan.prefill and on_layer is not None:
            for layer in range(self.info.num_layers):
                on_layer(layer)
        _check(len(set(plan.decode)) == len(plan.decode), f"a slot decodes twice in one step: {plan.decode}")
        drafts = {draft.slot: draft.tokens for draft in plan.drafts}
        _check(len(drafts) == len(plan.drafts) and drafts.keys() <= set(plan.decode), f"drafts of {list(drafts)}")
        for slot in plan.decode:
            draft = drafts.get(slot, ())
            if draft:
                self._draft(slot, draft)
            self._decode(slot, result)
            for token in draft:
                if result.tokens[-1] != token:
                    break
                self._decode(slot, result)
        return result

    def forget(self, slots: Collection[int]) -> None:
        """Release the slots. Their KV stays in the pages: a sequence that is admitted with them again continues with
        it."""
        for slot in slots:
            if slot in self._slots:
                self._release(slot)

    def warmup(self) -> None:
        """Do nothing: there is nothing to warm up."""

    def close(self) -> None:
        self.closed = True

    def _live(self, slot: int, what: str) -> _FakeSlot:
        state = self._slots.get(slot)
        if state is None:
            raise InvariantViolation(f"{what} of slot {slot}, which is free")
        return state

    def _admit(self, admit: Admit) -> None:
        slot = admit.slot
        tokens = unpack_i32(admit.token_ids).tolist()
        _check(0 <= slot < self.info.num_slots, f"admit to slot {slot} of {self.info.num_slots}")
        _check(slot not in self._slots, f"admit to slot {slot}, which is taken")
        _check(
            1 <= admit.prompt_len <= len(tokens), f"slot {slot}: prompt of {admit.prompt_len} in {len(tokens)} tokens"
        )
        _check(len(tokens) <= self.info.max_model_len, f"slot {slot}: {len(tokens)} tokens exceed the context")
        _check(0 <= admit.kv_len <= len(tokens), f"slot {slot}: kv_len {admit.kv_len} of {len(tokens)} tokens")
        _check(0 <= admit.adapter <= len(self.info.adapters), f"slot {slot}: adapter {admit.adapter} is not loaded")
        bad = next((token for token in tokens if not 0 <= token < self.info.vocab_size), None)
        _check(bad is None, f"slot {slot}: token id {bad} outside the vocabulary")
        state = self._slots[slot] = _FakeSlot(
            tokens=tokens,
            prompt_len=admit.prompt_len,
            state=_state_of(tokens, admit.adapter),
            kv_len=admit.kv_len,
            pages=[],
            sampling=admit.sampling,
            lacks_restore=0 < admit.kv_len < len(tokens)
            and not self._holds(admit.pages, tokens[: admit.kv_len], admit.adapter),
            adapter=admit.adapter,
        )
        self._take_pages(slot, state, admit.pages)
        self._take_state(slot, state, admit)
        self._require_pages(slot, state, admit.kv_len)
        if admit.kv_len == len(tokens):  # a transfer writes the KV, or has written it
            self._fill(state, 0, admit.kv_len)

    # ------------------------------------------------------------------------------------------------------ state rows

    def _take_state(self, slot: int, state: _FakeSlot, admit: Admit) -> None:
        row = admit.state_slot
        if not len(self._state_rows):
            _check(row == -1, f"slot {slot}: state row {row}, of none")
            return
        _check(-1 <= row < len(self._state_rows), f"slot {slot}: state row {row} of {len(self._state_rows)}")
        users = [other for other, each in self._slots.items() if each.state_slot == row >= 0]
        _check(not users, f"slot {slot}: state row {row}, which slots {users} have")
        state.state_slot, state.taken = row, _state_of(state.tokens[: admit.kv_len], state.adapter)
        if row >= 0 and not admit.kv_len:
            self._state_rows[row] = 0

    def _move_state(self, slot: int, state: _FakeSlot, start: int, end: int, is_chunk: bool) -> None:
        """Take the tokens `[start, end)` into the slot's state row, and stamp it behind a chunk."""
        if not len(self._state_rows):
            return
        _check(state.state_slot >= 0, f"slot {slot} computes without a state row")
        row = self._state_rows[state.state_slot]
        words = row[STAMP_BYTES:].view(np.uint32)
        if (words != state.taken).any():
            self._find_wrong_state(slot, state, zlib.crc32(words.tobytes()))
        state.taken = _state_of(state.tokens[start:end], state.adapter, state.taken, start)
        words[:] = state.taken ^ state.wrong
        if is_chunk:
            stamp = StateStamp(end, digest_of(pack_i32(state.tokens[:end]))).pack()
            row[: len(stamp)] = np.frombuffer(stamp, np.uint8)

    def _find_wrong_state(self, slot: int, state: _FakeSlot, found: int) -> None:
        """Take note of a state row that holds something else than it must."""
        raise InvariantViolation(f"slot {slot}: state row {state.state_slot} holds the state of other tokens")

    def _copy_state(self, copy: CopyState) -> None:
        state = self._live(copy.slot, "copy of a state")
        _check(
            0 <= copy.source < len(self._state_rows) and 0 <= state.state_slot != copy.source,
            f"slot {copy.slot}: state row {copy.source} is copied to {state.state_slot}",
        )
        self._state_rows[state.state_slot] = self._state_rows[copy.source]

    def _keep_state(self, keep: KeepState) -> None:
        state, target = self._live(keep.slot, "keeping of a state"), keep.target
        users = [slot for slot, each in self._slots.items() if each.state_slot == target]
        _check(
            0 <= target < len(self._state_rows) and not users and keep.num_tokens == state.kv_len,
            f"slot {keep.slot}, kv_len {state.kv_len}: {keep}; slots {users} have the row",
        )
        self._state_rows[target] = self._state_rows[state.state_slot]

    def _append(self, append: AppendPages) -> None:
        self._take_pages(append.slot, self._live(append.slot, "append"), append.pages)

    def _take_pages(self, slot: int, state: _FakeSlot, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise InvariantViolation(f"slot {slot}: page {page} of {self.num_pages}")
            users = self._users.setdefault(page, [])
            if slot in users:
                raise InvariantViolation(f"page {page} for slot {slot}, which has it already")
            users.append(slot)
            state.pages.append(page)

    def _holds(self, pages: Sequence[int], tokens: list[int], adapter: int = 0) -> bool:
        """Return whether the KV of these tokens with this adapter is in these pages."""
        for page, end in zip(pages, range(self.page_size, len(tokens) + self.page_size, self.page_size), strict=False):
            of_adapter, known, known_end = self._held.get(page, (adapter, tokens, 0))
            end = min(end, len(tokens))
            if of_adapter != adapter or known_end < end or known[:end] != tokens[:end]:
                return False
        return len(pages) * self.page_size >= len(tokens)

    def _is_repeat(self, page: int, state: _FakeSlot, end: int) -> bool:
        """Return whether a page holds already what is written to it: a state that is computed anew writes KV twice."""
        adapter, known, known_end = self._held.get(page, (0, [], 0))
        last = min(end, known_end)
        is_same = last > 0 and adapter == state.adapter and known[:last] == state.tokens[:last]
        return is_same and len(self._state_rows) > 0

    def _fill(self, state: _FakeSlot, start: int, end: int) -> None:
        """Record that the KV of its tokens `[start, end)` is in its pages."""
        for number in range(start // self.page_size, -(-end // self.page_size)):
            page_end = min((number + 1) * self.page_size, end)
            self._held[state.pages[number]] = (state.adapter, state.tokens, page_end)

    def _compute(self, slot: int, state: _FakeSlot, end: int) -> None:
        """Record the KV of the tokens from `kv_len` to `end` as computed."""
        for page in state.pages[state.kv_len // self.page_size : -(-end // self.page_size)]:
            if self._users[page] != [slot] and not self._is_repeat(page, state, end):
                raise InvariantViolation(f"slot {slot} writes to page {page}, which slots {self._users[page]} use")
        self._fill(state, state.kv_len, end)
        state.kv_len = end

    def _copy(self, copy: CopyPage) -> None:
        state, users = self._live(copy.slot, "copy"), self._users.get(copy.target)
        _check(users == [copy.slot], f"slot {copy.slot}: a copy to page {copy.target}, which slots {users} use")
        last = state.kv_len // self.page_size
        _check(
            copy.source != copy.target and state.pages[last] == copy.target and state.kv_len % self.page_size > 0,
            f"slot {copy.slot}: page {copy.source} is copied to {copy.target}, with KV of {state.kv_len} tokens",
        )

    def _require_pages(self, slot: int, state: _FakeSlot, tokens: int) -> None:
        if tokens > len(state.pages) * self.page_size:
            raise InvariantViolation(f"slot {slot}: {tokens} tokens in {len(state.pages)} pages of {self.page_size}")
        if tokens > self.info.max_model_len:
            raise InvariantViolation(f"slot {slot}: {tokens} tokens exceed the context")

    def _release(self, slot: int) -> None:
        state = self._live(slot, "release")
        for page in state.pages:
            self._users[page].remove(slot)
            if not self._users[page]:
                del self._users[page]
        del self._slots[slot]

    def _offload(self, offload: Offload) -> None:
        state = self._live(offload.slot, "offload")
        _check(offload.key not in self._saved, f"offload under key {offload.key}, which is in use")
        _check(not state.lacks_restore, f"offload of slot {offload.slot}, whose KV was never restored")
        _check(state.kv_len > 0, f"offload of slot {offload.slot}, which holds no KV")
        row = self._state_rows[state.state_slot].copy() if state.state_slot >= 0 else None
        self._saved[offload.key] = _Saved(state.kv_len, _state_of(state.tokens[: state.kv_len], state.adapter), row)
        self._release(offload.slot)

    def _restore(self, restore: Restore) -> None:
        state = self._live(restore.slot, "restore")
        saved = self._saved.pop(restore.key, None)
        if saved is None:
            raise InvariantViolation(f"restore of key {restore.key}, under which nothing is saved")
        _check(
            saved.kv_len == state.kv_len,
            f"slot {restore.slot}: kv_len {state.kv_len}, but {saved.kv_len} tokens are saved under {restore.key}",
        )
        _check(
            saved.state == _state_of(state.tokens[: state.kv_len], state.adapter),
            f"slot {restore.slot}: the KV under key {restore.key} is of other tokens",
        )
        state.lacks_restore = False
        if saved.row is not None:
            self._state_rows[state.state_slot] = saved.row
        self._fill(state, 0, state.kv_len)

    def _first_token(self, first: FirstToken, result: StepResult) -> None:
        state = self._live(first.slot, "first token")
        if first.is_checked and self.info.checks_rows:  # of a damaged row it draws what nobody may see
            result.rows[first.slot] = HostRows(self._aux_rows).checked(first.aux_slot, self.checked_to)
            checksum = int(_ROW.unpack_from(self.aux_row(first.aux_slot), AUX_HEADER_BYTES)[1])
        else:
            checksum = self.logits(first.aux_slot)
            _check(checksum == state.state, f"slot {first.slot}: row {first.aux_slot} holds logits of other tokens")
        _check(
            len(state.tokens) == state.kv_len,
            f"slot {first.slot}: first token after {len(state.tokens) - state.kv_len} tokens",
        )
        self._sample(first.slot, state, checksum, result)

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        state = self._live(chunk.slot, "prefill")
        end = chunk.start + chunk.length
        _check(chunk.length > 0, f"slot {chunk.slot}: chunk of {chunk.length} tokens")
        _check(chunk.start == state.kv_len, f"slot {chunk.slot}: chunk from {chunk.start}, kv_len is {state.kv_len}")
        _check(end <= len(state.tokens), f"slot {chunk.slot}: chunk to {end} of {len(state.tokens)} tokens")
        _check(not state.lacks_restore, f"slot {chunk.slot}: prefill onto KV that was never restored")
        self._require_pages(chunk.slot, state, end)
        self._compute(chunk.slot, state, end)
        self._move_state(chunk.slot, state, chunk.start, end, is_chunk=True)
        if chunk.logprobs >= 0:
            behind = state.tokens[chunk.start + 1 : end + 1]
            result.prompt_logprobs[chunk.slot] = b"".join([fake_logprobs(token, chunk.logprobs) for token in behind])
        if chunk.sample or chunk.aux_slot >= 0:
            _check(end == len(state.tokens), f"slot {chunk.slot}: logits at {end} of {len(state.tokens)} tokens")
        if chunk.aux_slot >= 0:
            _ROW.pack_into(self.aux_row(chunk.aux_slot), AUX_HEADER_BYTES, _ROW_MARK, state.state)
        if chunk.sample:
            self._sample(chunk.slot, state, state.state, result)

    def _decode(self, slot: int, result: StepResult) -> None:
        state = self._live(slot, "decode")
        if not 0 < state.kv_len == len(state.tokens) - 1:
            raise InvariantViolation(f"slot {slot}: decode with KV of {state.kv_len} tokens of {len(state.tokens)}")
        if state.lacks_restore:
            raise InvariantViolation(f"slot {slot}: decode with KV that was never restored")
        self._require_pages(slot, state, state.kv_len + 1)
        self._compute(slot, state, state.kv_len + 1)
        self._move_state(slot, state, state.kv_len - 1, state.kv_len, is_chunk=False)
        self._sample(slot, state, state.state, result)

    def _draft(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Check a draft, whose rows are all computed, whatever of it is right."""
        state = self._live(slot, "draft")
        _check(0 < len(tokens) <= self.info.most_drafts, f"slot {slot}: a draft of {len(tokens)} tokens")
        _check(all(0 <= token < self.info.vocab_size for token in tokens), f"slot {slot}: a draft of ids {tokens}")
        end = state.kv_len + 1 + len(tokens)
        self._require_pages(slot, state, end)
        for page in state.pages[state.kv_len // self.page_size : -(-end // self.page_size)]:
            _check(
                self._users[page] == [slot], f"slot {slot} drafts to page {page}, which slots {self._users[page]} use"
            )

    def _sample(self, slot: int, state: _FakeSlot, checksum: int, result: StepResult) -> None:
        if state.sampling is None:
            raise InvariantViolation(f"slot {slot} was admitted without sampling parameters and shall sample")
        checksum ^= state.wrong
        emitted = len(state.tokens) - state.prompt_len
        if emitted >= state.sampling.max_tokens:
            raise InvariantViolation(f"slot {slot}: token {emitted + 1} of {state.sampling.max_tokens}")
        token = _next_token(checksum, emitted, state.sampling, self.info.vocab_size)
        state.state = _state_of((token,), state.adapter, state.state, len(state.tokens))
        state.tokens.append(token)
        if state.sampling.logprobs is not None:
            result.logprobs[len(result.tokens)] = fake_logprobs(token, state.sampling.logprobs)
        result.slots.append(slot)
        result.tokens.append(token)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)


# ----------------------------------------------------------------------------------------------------------------------
# An engine without torch whose tokens depend on every byte of KV in its pages, for tests and benchmarks of failures. It
# starts in a fraction of a second, uses almost no CPU, and its KV goes over the real transports. It is the fake
# executor, which checks every plan, except that a token is the checksum of the KV that a step reads from the pages. So
# a page that is missing, stale, of another request or in the wrong order changes every token after it. Only the step
# thread calls `ChecksumExecutor`. Invariant: it keeps no KV, only the token ids of a slot.


NUM_LAYERS = NUM_REGIONS // 2


def checksum_layout(page_size: int, vocab_size: int, *, has_state: bool = False) -> KVLayout:
    layout = KVLayout.uniform("checksum", NUM_LAYERS, 1, RECORD_BYTES // 4, page_size, "float32", vocab_size)
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

    def _find_wrong_state(self, slot: int, state: _FakeSlot, found: int) -> None:
        """Let it change every token."""
        state.wrong = found | 1

    def _holds(self, pages: Sequence[int], tokens: list[int], adapter: int = 0) -> bool:
        """Accept any pages, since they may come from another process. Their contents show in the tokens."""
        return True

    def _rows(self, state: _FakeSlot, end: int) -> NDArray[np.int64]:
        """Return the rows of the KV of its first `end` tokens."""
        pages = np.array(state.pages[: -(-end // self.page_size)], np.int64) * self.page_size
        return np.add.outer(pages, np.arange(self.page_size)).ravel()[:end]

    def _attention(self, state: _FakeSlot, end: int) -> int:
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


# ----------------------------------------------------------------------------------------------------------------------
# An asynchronous device for tests: a step runs some time after its launch, when the test says so or a caller waits for
# it. Wraps an executor that computes at once (`FakeExecutor`, or one with KV of real bytes). Only the step thread calls
# it. As on a device, steps run in the order of their launches, layers are handed over before they are computed (with an
# event that completes when they are), and offloaded KV is in host memory when `launch` returns. The wrapped executor
# raises its errors about a plan when the step runs.


@dataclass(slots=True, eq=False)
class LateStep:
    """A launched step. Implements `StepHandle`, and `Ready` of all of its layers."""

    executor: LateExecutor
    plan: StepPlan
    slots: frozenset[int]
    """Slots that take part in the step."""
    pages: frozenset[int]
    """Pages of these slots, which the step may read or write."""
    aux_slots: frozenset[int]
    tokens: StepResult | None = None
    """Result of the step; None until it has run."""
    behind: LateStep | None = None
    """In the lane of prompts: the step that has admitted its slots, behind which it runs at any time."""

    def is_done(self) -> bool:
        return self.tokens is not None

    def result(self) -> StepResult:
        tokens = self._wait()
        self.executor.take(self)
        return tokens

    def _wait(self) -> StepResult:
        while self.tokens is None:
            if not (self.executor.run_beside() if self.behind is not None else self.executor.run_next()):
                raise InvariantViolation("a step waits for itself while it runs")
        return self.tokens

    def synchronize(self) -> None:
        self._wait()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()


class LateExecutor:
    """Executor whose steps run late. `unread` has the launched steps whose result was not read; the first may have run
    already."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner = inner
        self.unread: deque[LateStep] = deque()
        self.beside: LateStep | None = None
        """Step in the lane of prompts that was not read."""
        self.is_running = False
        """Whether a step is running; waiting for it now would never return."""
        self._waiting: deque[LateStep] = deque()
        self._tables: dict[int, list[int]] = {}
        """Pages of each slot after the newest launched step."""

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> LateStep:
        if len(self.unread) >= MAX_UNREAD_STEPS:
            raise InvariantViolation(f"a step was launched with {MAX_UNREAD_STEPS} unread")
        step = self._step(plan)
        if self.beside is not None and (plan.prefill or step.slots & self.beside.slots):
            raise InvariantViolation("a step has chunks, or a slot of those in the lane of prompts")
        self.unread.append(step)
        self._waiting.append(step)
        if on_layer is not None:
            for layer in range(self.info.num_layers):
                on_layer(layer, step)
        if plan.offload:
            step.synchronize()
        return step

    def launch_beside(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> tuple[LateStep, LateStep]:
        if self.beside is not None:
            raise InvariantViolation("two steps in the lane of prompts")
        step = self.launch(msgspec.structs.replace(plan, prefill=[]))
        self.beside = self._step(StepPlan(prefill=plan.prefill))
        self.beside.behind = step
        return step, self.beside

    def _step(self, plan: StepPlan) -> LateStep:
        for offload in plan.offload:
            self._tables.pop(offload.slot, None)
        for slot in plan.release:
            self._tables.pop(slot, None)
        for admit in plan.admit:
            self._tables[admit.slot] = list(admit.pages)
        for append in plan.append:
            self._tables[append.slot] += append.pages
        slots = {restore.slot for restore in plan.restore} | {first.slot for first in plan.first_tokens}
        slots |= {chunk.slot for chunk in plan.prefill} | set(plan.decode)
        aux_slots = {first.aux_slot for first in plan.first_tokens} | {chunk.aux_slot for chunk in plan.prefill}
        pages = frozenset(page for slot in slots for page in self._tables.get(slot, ()))
        pages |= {copy.source for copy in plan.copy}
        return LateStep(self, plan, frozenset(slots), pages, frozenset(aux_slots - {-1}))

    def forget(self, slots: Collection[int]) -> None:
        if self.unread or self.beside is not None:
            raise InvariantViolation("slots are forgotten with a step in flight")
        for slot in slots:
            self._tables.pop(slot, None)
        self.inner.forget(slots)

    @property
    def saved_keys(self) -> frozenset[int]:
        return self.inner.saved_keys

    def run_next(self) -> bool:
        """Run one step. Return False if there is none, or one is running."""
        if not self._waiting or self.is_running:
            return False
        step = self._waiting.popleft()
        self.is_running = True
        step.tokens = self.inner.execute(step.plan)
        self.is_running = False
        return True

    def run_beside(self) -> bool:
        """Run the step in the lane of prompts, behind the one that it follows. Return False if it has run, there is
        none, or one is running."""
        step = self.beside
        if step is None or step.tokens is not None or self.is_running:
            return False
        assert step.behind is not None
        while step.behind.tokens is None:
            self.run_next()
        self.is_running = True
        step.tokens = self.inner.execute(step.plan)
        self.is_running = False
        return True

    def take(self, step: LateStep) -> None:
        """Remove a step whose result was read."""
        if step is self.beside:
            self.beside = None
            return
        if step is not self.unread[0]:
            raise InvariantViolation("a step was read before the one launched ahead of it")
        self.unread.popleft()

    def warmup(self) -> None:
        """Do nothing: there is nothing to warm up."""

    def close(self) -> None:
        self.inner.close()
