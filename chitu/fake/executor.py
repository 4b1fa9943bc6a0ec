"""An executor without tensors, for fake instances and for the scheduler's tests and benchmarks. Step thread alone.

The next token of a slot is a checksum of the KV of all tokens it holds, so a token lost, doubled or put in the wrong
order by admission, retraction or hand-over changes every token after it; `expected_tokens` is the oracle. Every record
of a plan is checked against the needs of a real executor (pages, KV, slots), and an impossible plan raises
`InvariantViolation` with the values. It keeps no KV (`ChecksumExecutor` does), only which sequence uses which page and
which tokens' KV was computed into it: several slots may use a page, and then none may write to it. It keeps the logits
rows: `aux` takes writable memory, in which a row has the state of the checksum, so that a transport can carry it from P
to D.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chitu.engine.executor import (
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
from chitu.kv_cache.aux_row import AUX_HEADER_BYTES, HostRows
from chitu.kv_cache.state_row import STAMP_BYTES, StateStamp, digest_of
from chitu.protocol import SamplingParams, StateTensor, pack_i32, pack_logprobs, unpack_i32

NUM_REGIONS = 4
RECORD_BYTES = 16
"""Bytes of the KV of one token in one region."""
FIRST_TOKEN = 16
"""Smallest id of an answer; smaller ones are special tokens of a tokenizer."""
_KV = struct.Struct(f"<{4 * NUM_REGIONS}I")
FAKE_STATE = (StateTensor(0, "sum", "float32", (4, 4)),)
"""State of these executors' layouts, if they have one: the checksum of the KV of the tokens taken in, in each word."""
STATE_ROW_BYTES = STAMP_BYTES + 64
_ROW = struct.Struct("<4sI")
_ROW_MARK = b"FAKE"


class InvariantViolation(Internal):
    """No executor could run the plan: a bug of the scheduler that made it."""


def kv_of(token: int, position: int, state: int) -> bytes:
    """Return the KV of one token in all regions, `RECORD_BYTES` each. `state` is the checksum of all KV before it."""
    at = position
    return _KV.pack(token, at, state, 0, token, at, state, 1, token, at, state, 2, token, at, state, 3)


def _state_of(tokens: Sequence[int], adapter: int, state: int = 0, position: int = 0) -> int:
    """Return the checksum of the KV of these tokens after the tokens of `state`. Each adapter has its own KV."""
    pack, crc32 = _KV.pack, zlib.crc32
    # As `kv_of`, without its call: simulations do this most of their time.
    for at, token in enumerate(tokens, position):
        kv = state ^ adapter
        state = crc32(pack(token, at, kv, 0, token, at, kv, 1, token, at, kv, 2, token, at, kv, 3), state)
    return state


def next_token(state: int, num_emitted: int, sampling: SamplingParams, vocab_size: int) -> int:
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
        tokens.append(next_token(state, num_emitted, sampling, vocab_size))
        state = _state_of(tokens[-1:], adapter, state, len(prompt) + num_emitted)
    return tokens


def fake_logprobs(token: int, count: int) -> bytes:
    """Return this executor's logprobs of a token, from which the token can be recognised."""
    return pack_logprobs(-float(token), [(token + rank, -float(rank)) for rank in range(count)])


@dataclass(slots=True)
class FakeSlot:
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
class SavedRows:
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
        self.adapters = set(range(len(info.adapters) + 1))
        """Numbers of the adapters that are loaded, and 0."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._aux_rows = np.zeros((0, 128), np.uint8) if aux_rows is None else aux_rows
        self._state_rows = np.zeros((0, STATE_ROW_BYTES), np.uint8) if state_rows is None else state_rows
        self._slots: dict[int, FakeSlot] = {}
        self._users: dict[int, list[int]] = {}
        """Slots that use each page."""
        self._saved: dict[int, SavedRows] = {}
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
        check_plan(0 <= aux_slot < len(self._aux_rows), f"aux slot {aux_slot} of {len(self._aux_rows)}")
        return memoryview(self._aux_rows[aux_slot])

    def logits(self, aux_slot: int) -> int:
        """Return the checksum in a row, which stands for logits."""
        mark, checksum = _ROW.unpack_from(self.aux_row(aux_slot), AUX_HEADER_BYTES)
        check_plan(mark == _ROW_MARK, f"aux slot {aux_slot} holds no logits")
        return int(checksum)

    def launch(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> DoneStep:
        return DoneStep(self.execute(plan, on_layer))

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        check_plan(not self.closed, "a step after close")
        self.steps += 1
        result = StepResult([], [], rows={})
        for offload in plan.offload:
            self._offload(offload)
        for slot in plan.release:
            self._release(slot)
        for key in plan.drop:
            check_plan(self._saved.pop(key, None) is not None, f"drop of key {key}, under which nothing is saved")
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
        check_plan(len(set(plan.decode)) == len(plan.decode), f"a slot decodes twice in one step: {plan.decode}")
        drafts = {draft.slot: draft.tokens for draft in plan.drafts}
        check_plan(len(drafts) == len(plan.drafts) and drafts.keys() <= set(plan.decode), f"drafts of {list(drafts)}")
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

    def _live(self, slot: int, what: str) -> FakeSlot:
        state = self._slots.get(slot)
        if state is None:
            raise InvariantViolation(f"{what} of slot {slot}, which is free")
        return state

    def _admit(self, admit: Admit) -> None:
        slot = admit.slot
        tokens = unpack_i32(admit.token_ids).tolist()
        check_plan(0 <= slot < self.info.num_slots, f"admit to slot {slot} of {self.info.num_slots}")
        check_plan(slot not in self._slots, f"admit to slot {slot}, which is taken")
        check_plan(
            1 <= admit.prompt_len <= len(tokens), f"slot {slot}: prompt of {admit.prompt_len} in {len(tokens)} tokens"
        )
        check_plan(len(tokens) <= self.info.max_model_len, f"slot {slot}: {len(tokens)} tokens exceed the context")
        check_plan(0 <= admit.kv_len <= len(tokens), f"slot {slot}: kv_len {admit.kv_len} of {len(tokens)} tokens")
        check_plan(admit.adapter in self.adapters, f"slot {slot}: adapter {admit.adapter} is not loaded")
        bad = next((token for token in tokens if not 0 <= token < self.info.vocab_size), None)
        check_plan(bad is None, f"slot {slot}: token id {bad} outside the vocabulary")
        state = self._slots[slot] = FakeSlot(
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

    def _take_state(self, slot: int, state: FakeSlot, admit: Admit) -> None:
        row = admit.state_slot
        if not len(self._state_rows):
            check_plan(row == -1, f"slot {slot}: state row {row}, of none")
            return
        check_plan(-1 <= row < len(self._state_rows), f"slot {slot}: state row {row} of {len(self._state_rows)}")
        users = [other for other, each in self._slots.items() if each.state_slot == row >= 0]
        check_plan(not users, f"slot {slot}: state row {row}, which slots {users} have")
        state.state_slot, state.taken = row, _state_of(state.tokens[: admit.kv_len], state.adapter)
        if row >= 0 and not admit.kv_len:
            self._state_rows[row] = 0

    def _move_state(self, slot: int, state: FakeSlot, start: int, end: int, is_chunk: bool) -> None:
        """Take the tokens `[start, end)` into the slot's state row, and stamp it behind a chunk."""
        if not len(self._state_rows):
            return
        check_plan(state.state_slot >= 0, f"slot {slot} computes without a state row")
        row = self._state_rows[state.state_slot]
        words = row[STAMP_BYTES:].view(np.uint32)
        if (words != state.taken).any():
            self._find_wrong_state(slot, state, zlib.crc32(words.tobytes()))
        state.taken = _state_of(state.tokens[start:end], state.adapter, state.taken, start)
        words[:] = state.taken ^ state.wrong
        if is_chunk:
            stamp = StateStamp(end, digest_of(pack_i32(state.tokens[:end]))).pack()
            row[: len(stamp)] = np.frombuffer(stamp, np.uint8)

    def _find_wrong_state(self, slot: int, state: FakeSlot, found: int) -> None:
        """Take note of a state row that holds something else than it must."""
        raise InvariantViolation(f"slot {slot}: state row {state.state_slot} holds the state of other tokens")

    def _copy_state(self, copy: CopyState) -> None:
        state = self._live(copy.slot, "copy of a state")
        check_plan(
            0 <= copy.source < len(self._state_rows) and 0 <= state.state_slot != copy.source,
            f"slot {copy.slot}: state row {copy.source} is copied to {state.state_slot}",
        )
        self._state_rows[state.state_slot] = self._state_rows[copy.source]

    def _keep_state(self, keep: KeepState) -> None:
        state, target = self._live(keep.slot, "keeping of a state"), keep.target
        users = [slot for slot, each in self._slots.items() if each.state_slot == target]
        check_plan(
            0 <= target < len(self._state_rows) and not users and keep.num_tokens == state.kv_len,
            f"slot {keep.slot}, kv_len {state.kv_len}: {keep}; slots {users} have the row",
        )
        self._state_rows[target] = self._state_rows[state.state_slot]

    def _append(self, append: AppendPages) -> None:
        self._take_pages(append.slot, self._live(append.slot, "append"), append.pages)

    def _take_pages(self, slot: int, state: FakeSlot, pages: Sequence[int]) -> None:
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

    def _is_repeat(self, page: int, state: FakeSlot, end: int) -> bool:
        """Return whether a page holds already what is written to it: a state that is computed anew writes KV twice."""
        adapter, known, known_end = self._held.get(page, (0, [], 0))
        last = min(end, known_end)
        is_same = last > 0 and adapter == state.adapter and known[:last] == state.tokens[:last]
        return is_same and len(self._state_rows) > 0

    def _fill(self, state: FakeSlot, start: int, end: int) -> None:
        """Record that the KV of its tokens `[start, end)` is in its pages."""
        for number in range(start // self.page_size, -(-end // self.page_size)):
            page_end = min((number + 1) * self.page_size, end)
            self._held[state.pages[number]] = (state.adapter, state.tokens, page_end)

    def _compute(self, slot: int, state: FakeSlot, end: int) -> None:
        """Record the KV of the tokens from `kv_len` to `end` as computed."""
        for page in state.pages[state.kv_len // self.page_size : -(-end // self.page_size)]:
            if self._users[page] != [slot] and not self._is_repeat(page, state, end):
                raise InvariantViolation(f"slot {slot} writes to page {page}, which slots {self._users[page]} use")
        self._fill(state, state.kv_len, end)
        state.kv_len = end

    def _copy(self, copy: CopyPage) -> None:
        state, users = self._live(copy.slot, "copy"), self._users.get(copy.target)
        check_plan(users == [copy.slot], f"slot {copy.slot}: a copy to page {copy.target}, which slots {users} use")
        last = state.kv_len // self.page_size
        check_plan(
            copy.source != copy.target and state.pages[last] == copy.target and state.kv_len % self.page_size > 0,
            f"slot {copy.slot}: page {copy.source} is copied to {copy.target}, with KV of {state.kv_len} tokens",
        )

    def _require_pages(self, slot: int, state: FakeSlot, tokens: int) -> None:
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
        check_plan(offload.key not in self._saved, f"offload under key {offload.key}, which is in use")
        check_plan(not state.lacks_restore, f"offload of slot {offload.slot}, whose KV was never restored")
        check_plan(state.kv_len > 0, f"offload of slot {offload.slot}, which holds no KV")
        row = self._state_rows[state.state_slot].copy() if state.state_slot >= 0 else None
        self._saved[offload.key] = SavedRows(state.kv_len, _state_of(state.tokens[: state.kv_len], state.adapter), row)
        self._release(offload.slot)

    def _restore(self, restore: Restore) -> None:
        state = self._live(restore.slot, "restore")
        saved = self._saved.pop(restore.key, None)
        if saved is None:
            raise InvariantViolation(f"restore of key {restore.key}, under which nothing is saved")
        check_plan(
            saved.kv_len == state.kv_len,
            f"slot {restore.slot}: kv_len {state.kv_len}, but {saved.kv_len} tokens are saved under {restore.key}",
        )
        check_plan(
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
            check_plan(checksum == state.state, f"slot {first.slot}: row {first.aux_slot} holds logits of other tokens")
        check_plan(
            len(state.tokens) == state.kv_len,
            f"slot {first.slot}: first token after {len(state.tokens) - state.kv_len} tokens",
        )
        self._sample(first.slot, state, checksum, result)

    def _prefill(self, chunk: PrefillChunk, result: StepResult) -> None:
        state = self._live(chunk.slot, "prefill")
        end = chunk.start + chunk.length
        check_plan(chunk.length > 0, f"slot {chunk.slot}: chunk of {chunk.length} tokens")
        check_plan(
            chunk.start == state.kv_len, f"slot {chunk.slot}: chunk from {chunk.start}, kv_len is {state.kv_len}"
        )
        check_plan(end <= len(state.tokens), f"slot {chunk.slot}: chunk to {end} of {len(state.tokens)} tokens")
        check_plan(not state.lacks_restore, f"slot {chunk.slot}: prefill onto KV that was never restored")
        self._require_pages(chunk.slot, state, end)
        self._compute(chunk.slot, state, end)
        self._move_state(chunk.slot, state, chunk.start, end, is_chunk=True)
        if chunk.logprobs >= 0:
            behind = state.tokens[chunk.start + 1 : end + 1]
            result.prompt_logprobs[chunk.slot] = b"".join([fake_logprobs(token, chunk.logprobs) for token in behind])
        if chunk.sample or chunk.aux_slot >= 0:
            check_plan(end == len(state.tokens), f"slot {chunk.slot}: logits at {end} of {len(state.tokens)} tokens")
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
        check_plan(0 < len(tokens) <= self.info.most_drafts, f"slot {slot}: a draft of {len(tokens)} tokens")
        check_plan(all(0 <= token < self.info.vocab_size for token in tokens), f"slot {slot}: a draft of ids {tokens}")
        end = state.kv_len + 1 + len(tokens)
        self._require_pages(slot, state, end)
        for page in state.pages[state.kv_len // self.page_size : -(-end // self.page_size)]:
            check_plan(
                self._users[page] == [slot], f"slot {slot} drafts to page {page}, which slots {self._users[page]} use"
            )

    def _sample(self, slot: int, state: FakeSlot, checksum: int, result: StepResult) -> None:
        if state.sampling is None:
            raise InvariantViolation(f"slot {slot} was admitted without sampling parameters and shall sample")
        checksum ^= state.wrong
        emitted = len(state.tokens) - state.prompt_len
        if emitted >= state.sampling.max_tokens:
            raise InvariantViolation(f"slot {slot}: token {emitted + 1} of {state.sampling.max_tokens}")
        token = next_token(checksum, emitted, state.sampling, self.info.vocab_size)
        state.state = _state_of((token,), state.adapter, state.state, len(state.tokens))
        state.tokens.append(token)
        if state.sampling.logprobs is not None:
            result.logprobs[len(result.tokens)] = fake_logprobs(token, state.sampling.logprobs)
        result.slots.append(slot)
        result.tokens.append(token)


def check_plan(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)
