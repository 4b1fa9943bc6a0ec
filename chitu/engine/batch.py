"""Slots: the executor's state of each sequence between steps, and the batch that a plan makes of them. Owned by
`ModelRunner`, step thread only.

Device tensors hold token ids and page tables. Lengths are host integers: every sampled row adds exactly one token, so
the host needs no answer from the device, unless a sequence has a draft, whose rows are drawn as long as it is right.
Small tensors reach the device without a wait (`upload`): a copy from pageable memory waits until all that was launched
before it is done, so the next step could not be launched while one runs. A copy from pinned memory is one more
operation in the queue; torch keeps such memory until the copy has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.engine.executor import Admit, AppendPages, PrefillChunk
from chitu.errors import Internal
from chitu.kv_cache.state_row import StateStamp, digest_of
from chitu.ops.image_rows import ImageTable
from chitu.ops.interface import AdapterRows, Batch, Span, tiles_of
from chitu.protocol import unpack_i32

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]
NO_DRAFTS: Mapping[int, Sequence[int]] = {}


def upload(values: Values, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a tensor of these numbers on `device`, for operations launched from now on."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_tensor(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on `device`, as `upload` does."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class SlotState:
    """Host side of a slot."""

    num_tokens: int
    """Number of prompt and output tokens so far."""
    kv_len: int
    """Tokens whose K and V are in the pages."""
    num_pages: int
    samples: bool
    """Whether it was admitted with sampling parameters."""
    state_slot: int = -1
    """Row of its recurrent state; -1 without one."""
    token_ids: bytes = b""
    """Tokens of its admission, if it has such a row: their digest stamps it."""
    digest: int = 0
    """Digest of the tokens that chunks have computed (`state_row.digest_of`)."""


def host_rows(
    spans: Sequence[Span], slots: Sequence[int], positions: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return slots and positions of the rows of these spans, then of one row for each of `slots`: int64 `[2, T]` on the
    host, pinned for CUDA so that a copy does not wait. Made with numpy: 8192 rows as Python numbers would cost 3 ms."""
    num_span_rows = sum(span.length for span in spans)
    rows_2T = torch.empty(2, num_span_rows + len(slots), dtype=torch.int64, pin_memory=device.type == "cuda")
    slots_T, positions_T = rows_2T.numpy()
    for span in spans:
        rows = slice(span.row, span.row + span.length)
        slots_T[rows] = span.slot
        positions_T[rows] = np.arange(span.start, span.start + span.length)
    slots_T[num_span_rows:] = slots
    positions_T[num_span_rows:] = positions
    return rows_2T


class SlotTable:
    """A table of `num_slots` sequences of at most `max_model_len` tokens in pages of `page_size`.

    Behind them is the scratch slot, for rows that only pad a batch: all its pages are `scratch_page`, which no sequence
    may own (None: no batch is padded).
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        num_pages: int,
        device: torch.device,
        scratch_page: int | None = None,
        num_state_slots: int = 0,
        images: ImageTable | None = None,
    ) -> None:
        """`num_state_slots`: rows of recurrent state; 0 if the model has none. `images`: None if it sees none."""
        self.num_slots = num_slots
        self.scratch_slot = num_slots
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.device = device
        self._num_pages = num_pages
        self._num_state_slots = num_state_slots
        self._state_owners: dict[int, int] = {}
        """Slot of each state row in use."""
        self.images = images
        self._adapters: dict[int, int] = {}
        """Number of the LoRA adapter of each slot that has one."""
        max_pages = (max_model_len + page_size - 1) // page_size
        # One column more than tokens are fed, for the last token of a full sequence.
        self.token_ids = torch.zeros(num_slots + 1, max_model_len + 1, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(num_slots + 1, max_pages, dtype=torch.int64, device=device)
        if scratch_page is not None:
            self.page_table[self.scratch_slot] = scratch_page
        self._sequences: list[SlotState | None] = [None] * num_slots

    def __getitem__(self, slot: int) -> SlotState:
        sequence = self._sequences[slot] if 0 <= slot < len(self._sequences) else None
        if sequence is None:
            raise Internal(f"slot {slot} holds no sequence")
        return sequence

    def admit(
        self, admits: Sequence[Admit], appends: Sequence[AppendPages] = (), more: Sequence[int] = ()
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Fill free slots and append the pages of a whole plan, with one copy to the device. Return the token ids of
        each admission (int64, device), and `more` numbers there."""
        prompts = [self._fill(admit) for admit in admits]
        pages = self._append([*[AppendPages(admit.slot, admit.pages) for admit in admits], *appends])
        parts = [*prompts, *pages, np.array(more, dtype=np.int64)]
        if not any(map(len, parts)):
            return [], torch.empty(0, dtype=torch.int64, device=self.device)
        numbers = upload_tensor(torch.from_numpy(np.concatenate(parts)), self.device)
        sent = torch.split(numbers, [len(part) for part in parts])
        rows = [self.token_ids[admit.slot, : len(part)] for admit, part in zip(admits, prompts, strict=True)]
        for row, part in zip(rows, sent[: len(rows)], strict=True):
            row.copy_(part)
        slots, columns, new = sent[len(rows) : len(rows) + 3]
        if len(new):
            self.page_table[slots, columns] = new
        return rows, sent[-1]

    def _fill(self, admit: Admit) -> NDArray[np.int64]:
        """Fill a free slot on the host, and return its token ids."""
        if not 0 <= admit.slot < len(self._sequences) or self._sequences[admit.slot] is not None:
            raise Internal(f"slot {admit.slot} is not free")
        tokens = np.array(unpack_i32(admit.token_ids), dtype=np.int64)
        if not 0 < len(tokens) <= self.max_model_len:
            raise Internal(f"slot {admit.slot}: {len(tokens)} tokens; a slot holds 1 to {self.max_model_len}")
        if admit.images:
            if self.images is None:
                raise Internal(f"slot {admit.slot}: this model sees no images")
            self.images.admit(admit.slot, admit.images, len(tokens))
        sequence = SlotState(len(tokens), admit.kv_len, 0, admit.sampling is not None)
        if admit.state_slot != -1:
            if not 0 <= admit.state_slot < self._num_state_slots or admit.state_slot in self._state_owners:
                raise Internal(f"slot {admit.slot}: state row {admit.state_slot} is not free")
            self._state_owners[admit.state_slot] = admit.slot
            sequence.state_slot, sequence.token_ids = admit.state_slot, admit.token_ids
            sequence.digest = digest_of(admit.token_ids[: 4 * admit.kv_len])
        if admit.adapter:
            self._adapters[admit.slot] = admit.adapter
        self._sequences[admit.slot] = sequence
        return tokens

    def release(self, slot: int) -> SlotState:
        sequence = self[slot]
        self.forget(slot)
        return sequence

    def forget(self, slot: int) -> None:
        """Free the slot, also if it holds no sequence."""
        sequence, self._sequences[slot] = self._sequences[slot], None
        self._adapters.pop(slot, None)
        if self.images is not None:
            self.images.forget(slot)
        if sequence is not None and sequence.state_slot >= 0:
            del self._state_owners[sequence.state_slot]

    def _append(self, appends: Sequence[AppendPages]) -> list[NDArray[np.int64]]:
        """Append pages on the host, and return slot, column and page of each for the table on the device."""
        slots: list[int] = []
        columns: list[int] = []
        new: list[int] = []
        for slot, pages in ((append.slot, append.pages) for append in appends):
            sequence = self[slot]
            end = sequence.num_pages + len(pages)
            if end > self.page_table.shape[1] or any(not 0 <= page < self._num_pages for page in pages):
                raise Internal(f"slot {slot}: pages {list(pages)} after {sequence.num_pages} do not fit")
            slots.extend([slot] * len(pages))
            columns.extend(range(sequence.num_pages, end))
            new.extend(pages)
            sequence.num_pages = end
        return [np.array(each, dtype=np.int64) for each in (slots, columns, new)]

    def pages_of(self, slot: int, num_tokens: int) -> torch.Tensor:
        """Return the pages (int64, device) that hold the first `num_tokens` of a slot."""
        count = (num_tokens + self.page_size - 1) // self.page_size
        if count > self[slot].num_pages:
            raise Internal(f"slot {slot}: {num_tokens} tokens need {count} pages, it has {self[slot].num_pages}")
        return self.page_table[slot, :count]

    def append_tokens(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Append sampled tokens `[len(slots)]` (device) to their slots."""
        positions = self.count_tokens(slots)
        where = upload([list(slots), positions], self.device)
        self.token_ids[where[0], where[1]] = tokens

    def count_tokens(self, slots: Sequence[int]) -> list[int]:
        """Count one more token for each slot, which the device appends, and return the positions of these tokens."""
        positions = []
        for slot in slots:
            sequence = self[slot]
            positions.append(sequence.num_tokens)
            sequence.num_tokens += 1
        return positions

    def advance_prefill(self, prefill: Sequence[PrefillChunk]) -> list[Span]:
        """Return the chunks as spans of rows. Advances `kv_len` of their sequences."""
        spans: list[Span] = []
        row = 0
        for chunk in prefill:
            sequence, end = self[chunk.slot], chunk.start + chunk.length
            if chunk.length < 1 or chunk.start != sequence.kv_len or end > sequence.num_tokens:
                raise Internal(
                    f"chunk {chunk} does not follow kv_len {sequence.kv_len} of {sequence.num_tokens} tokens"
                )
            self._advance(chunk.slot, sequence, end)
            spans.append(Span(row, chunk.length, chunk.slot, chunk.start, sequence.state_slot))
            row += chunk.length
        return spans

    def advance_decode(self, slots: Sequence[int]) -> list[int]:
        """Return the positions at which these slots feed their newest token. Advances `kv_len` of their sequences."""
        positions: list[int] = []
        for slot in slots:
            sequence = self[slot]
            if sequence.kv_len != sequence.num_tokens - 1:
                raise Internal(f"slot {slot}: decode with kv_len {sequence.kv_len} of {sequence.num_tokens} tokens")
            positions.append(sequence.kv_len)
            self._advance(slot, sequence, sequence.kv_len + 1)
        return positions

    def with_drafts(
        self, slots: Sequence[int], positions: Sequence[int], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Return slots and positions of all rows of decoding slots: behind the newest token of each, those of its
        draft, whose ids get their places behind it. `kv_len` stays behind the newest token until `settle`."""
        rows: list[int] = []
        places: list[int] = []
        ids: list[int] = []
        for slot, position in zip(slots, positions, strict=True):
            tokens = drafts.get(slot, ())
            end = position + 1 + len(tokens)
            if end > self.max_model_len or end > self[slot].num_pages * self.page_size:
                raise Internal(f"slot {slot}: a draft up to {end} tokens does not fit")
            rows += [slot] * (1 + len(tokens))
            places += range(position, end)
            ids += (-1, *tokens)
        drafted = [row for row, token in enumerate(ids) if token >= 0]
        where = [[rows[row] for row in drafted], [places[row] for row in drafted], [ids[row] for row in drafted]]
        on_device = upload(where, self.device)
        self.token_ids[on_device[0], on_device[1]] = on_device[2]
        return rows, places

    def settle(self, slot: int, num_accepted: int) -> None:
        """Count the KV of the draft's first tokens, which were drawn: now that of all tokens but the newest counts."""
        sequence = self[slot]
        sequence.kv_len += num_accepted
        if sequence.kv_len != sequence.num_tokens - 1:
            raise Internal(f"slot {slot}: KV of {sequence.kv_len} tokens after a draft, of {sequence.num_tokens}")

    def build(
        self, prefill: Sequence[PrefillChunk], decode: Sequence[int], drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> tuple[Batch, torch.Tensor]:
        """Return the rows of a forward and their token ids `[T]`. Advances `kv_len` of every sequence in it."""
        spans = self.advance_prefill(prefill)
        positions = self.advance_decode(decode)
        if drafts:
            decode, positions = self.with_drafts(decode, positions, drafts)
        decode_states: tuple[int, ...] = ()
        if self._num_state_slots:
            decode_states = tuple(self[slot].state_slot for slot in decode)
            if min((*decode_states, *(span.state_slot for span in spans)), default=0) < 0:
                raise Internal(f"a sequence computes without a state row: {spans}, {decode}")
        return self.batch_of(spans, decode, positions, decode_states=decode_states)

    def batch_of(
        self,
        spans: Sequence[Span],
        decode: Sequence[int],
        positions: Sequence[int],
        first_position: int = 0,
        decode_states: tuple[int, ...] = (),
    ) -> tuple[Batch, torch.Tensor]:
        """Return these spans, and behind them a row for each of `decode`, and the token ids `[T]` at their places."""
        decode_row = sum(span.length for span in spans)
        rows = host_rows(spans, decode, positions, self.device).to(self.device, non_blocking=True)
        batch = Batch(
            slots_T=rows[0],
            positions_T=rows[1],
            page_table=self.page_table,
            spans=tuple(spans),
            spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64).view(-1, 4),
            tiles_Y4=upload(tiles_of(spans), self.device).view(-1, 4),
            decode_row=decode_row,
            decode_slots=tuple(decode),
            max_decode_len=max(positions, default=-1) + 1,
            decode_states=decode_states,
            adapters=self._adapter_rows(spans, decode, decode_row) if self._adapters else (),
            first_position=first_position,
            rope_3T=self.images.rope(spans, decode, positions) if self.images is not None else None,
            images=self.images.rows(spans, decode, positions) if self.images is not None else None,
        )
        return batch, self.token_ids[rows[0], rows[1]]

    def has_adapter(self, slots: Iterable[int]) -> bool:
        """Return whether one of these slots has a LoRA adapter."""
        return bool(self._adapters) and not self._adapters.keys().isdisjoint(slots)

    def _adapter_rows(self, spans: Sequence[Span], decode: Sequence[int], decode_row: int) -> tuple[AdapterRows, ...]:
        """Return the rows of each adapter in a forward."""
        found: dict[int, list[range]] = {}
        for span in spans:
            if adapter := self._adapters.get(span.slot):
                found.setdefault(adapter, []).append(range(span.row, span.row + span.length))
        for row, slot in enumerate(decode, decode_row):
            if adapter := self._adapters.get(slot):
                found.setdefault(adapter, []).append(range(row, row + 1))
        return tuple(AdapterRows(adapter, self._rows_of(runs)) for adapter, runs in found.items())

    def _rows_of(self, runs: Sequence[range]) -> slice | torch.Tensor:
        if sum(map(len, runs)) == runs[-1].stop - runs[0].start:
            return slice(runs[0].start, runs[-1].stop)
        return upload(np.concatenate([np.arange(run.start, run.stop) for run in runs]).tolist(), self.device)

    def stamps(self, spans: Sequence[Span]) -> list[tuple[int, StateStamp]]:
        """Return the state rows of computed chunks, each with its stamp from now on."""
        found = []
        for span in spans:
            sequence, end = self[span.slot], span.start + span.length
            sequence.digest = digest_of(sequence.token_ids[4 * span.start : 4 * end], sequence.digest)
            found.append((sequence.state_slot, StateStamp(end, sequence.digest)))
        return found

    def _advance(self, slot: int, sequence: SlotState, kv_len: int) -> None:
        if kv_len > self.max_model_len or kv_len > sequence.num_pages * self.page_size:
            raise Internal(f"slot {slot}: {kv_len} tokens do not fit into {sequence.num_pages} pages")
        sequence.kv_len = kv_len
