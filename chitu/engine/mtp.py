"""Drafts by the model: the entries of its drafting layer (`models/draft_layer.py`), and what it guesses behind the
newest token of each sequence. Owned by `ModelRunner`, step thread only.

The entry at position p needs token p and the hidden state of position p - 1. Those of a prompt are computed with its
chunks; that of a drawn token in the step that draws it, once its page is there, else in the next step of its sequence.
So all positions below `kv_len` have entries between steps, and whatever keeps or moves pages counts by `kv_len`.

The hidden state of the newest computed position is kept by slot, as the next entry needs it; to D it travels in the aux
row. Where it is missing (behind a cached prefix, after a retraction, in a repeated step) the entry is a hole: that of
an input of zeros, never what was in the page before. A hole costs acceptance, never a token.

For further tokens the layer is used again on its own: on the token that it drafted, and its own result as the hidden
state before that. What it writes there is garbage once other tokens are drawn, and they overwrite it as theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from chitu.engine.batch import SlotTable, upload
from chitu.engine.step_tokens import Guesses
from chitu.models.layers import DecoderModel
from chitu.models.model import KVViews
from chitu.ops.interface import Span

FIRST_POSITION = 1
"""Position of the first entry: no hidden state is before position 0."""


class Forwarded(NamedTuple):
    """What a step has computed of the model."""

    hidden_TD: torch.Tensor
    """Hidden states behind the final norm: of the rows of spans, then of rows that decode."""
    spans: Sequence[Span]
    decode_slots: Sequence[int]

    @property
    def decode_row(self) -> int:
        return self.hidden_TD.shape[0] - len(self.decode_slots)


class _ComputedRows(NamedTuple):
    """Rows of a forward that are of one sequence: not those behind a wrong draft."""

    row: int
    start: int
    """Position of the first."""
    length: int
    is_chunk: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class _NewEntries:
    """Rows of the drafting layer behind those of chunks."""

    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    """Place of the hidden state that each takes: a row of the forward, or behind all of these a slot."""
    newest: dict[int, int] = field(default_factory=dict)
    """Row of the newest token, by slot, if it was drawn in this step."""


class MtpDrafts:
    """`most`: tokens that the layer drafts in a row."""

    def __init__(self, table: SlotTable, hidden_size: int, dtype: torch.dtype, most: int = 1) -> None:
        self._table = table
        self._most = most
        self._device = table.device
        self._hidden_SD = torch.zeros(table.num_slots + 1, hidden_size, dtype=dtype, device=table.device)
        """Hidden states that are kept, by slot. The row behind them stays zero: there is none."""
        self._known: dict[int, int] = {}
        """Position of each slot's hidden state, if one is kept."""
        self._num_entries: dict[int, int] = {}

    def admit(self, slot: int, kv_len: int) -> None:
        self._num_entries[slot] = kv_len

    def forget(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._num_entries.pop(slot, None)

    def take_hidden(self, slots: Sequence[int], hidden_RD: torch.Tensor) -> None:
        """Take the hidden states of the last positions that these slots have in the cache, from aux rows."""
        self._hidden_SD[upload(slots, self._device)] = hidden_RD.to(self._hidden_SD.dtype)
        self._known.update({slot: self._table[slot].kv_len - 1 for slot in slots})

    def compute(
        self,
        model: DecoderModel,
        cache: KVViews,
        forward: Forwarded | None,
        drawn: Sequence[int],
        waiting: Collection[int],
        on_layer: Callable[[int], None] | None,
    ) -> Guesses | None:
        """Compute the entries that a step makes possible, and return the guesses behind the newest tokens.

        `forward`: None if the step has none. `drawn`: slots of the tokens that the step drew, which are appended.
        `waiting`: those of them whose KV is not here yet.
        """
        counts = Counter(drawn)
        spans: Sequence[Span] = ()
        runs: dict[int, _ComputedRows] = {}
        states_SD, num_rows = self._hidden_SD, 0
        if forward is not None:
            spans, runs, num_rows = forward.spans, self._runs(forward, counts), forward.hidden_TD.shape[0]
            states_SD = torch.cat([forward.hidden_TD, self._hidden_SD])
        rows = _NewEntries()
        for slot in counts:
            if slot not in waiting:
                self._add_rows(rows, slot, runs.get(slot), num_rows)
        guesses = None
        if spans or rows.slots:
            guesses = self._guess(model, cache, spans, rows, states_SD, num_rows, on_layer)
        if runs:
            kept = upload([run.row + run.length - 1 for run in runs.values()], self._device)
            self._hidden_SD[upload(list(runs), self._device)] = states_SD[kept]
            self._known.update({slot: run.end - 1 for slot, run in runs.items()})
        return guesses

    def warm_up(self, model: DecoderModel, cache: KVViews, sizes: Sequence[int]) -> None:
        """Compute so many rows of nobody, of the scratch slot, so that no request waits for a kernel to be compiled."""
        for size in sizes:
            scratch, hidden_TD = [self._table.scratch_slot] * size, self._hidden_SD[-1:].expand(size, -1)
            batch, token_ids_T = self._table.batch_of((), scratch, [0] * size, FIRST_POSITION)
            is_hole_T = torch.ones(size, dtype=torch.bool, device=self._device)
            model.draft_logits(model.draft(token_ids_T, hidden_TD, is_hole_T, batch, cache))

    def _runs(self, forward: Forwarded, counts: Mapping[int, int]) -> dict[int, _ComputedRows]:
        runs = {span.slot: _ComputedRows(span.row, span.start, span.length, True) for span in forward.spans}
        for row, slot in enumerate(forward.decode_slots, forward.decode_row):
            if slot not in runs:
                runs[slot] = _ComputedRows(row, self._table[slot].num_tokens - 1 - counts[slot], counts[slot], False)
        return runs

    def _add_rows(self, rows: _NewEntries, slot: int, run: _ComputedRows | None, num_rows: int) -> None:
        """Add the rows of a slot that has drawn, up to its newest token, as far as it has pages."""
        sequence = self._table[slot]
        first = run.end if run is not None and run.is_chunk else self._num_entries[slot]
        end = min(sequence.num_tokens, self._room_of(slot))
        for position in range(first, end):
            rows.slots.append(slot)
            rows.positions.append(position)
            rows.sources.append(self._source(slot, position - 1, run, num_rows))
        if first < end == sequence.num_tokens:
            rows.newest[slot] = len(rows.slots) - 1
        self._num_entries[slot] = max(first, end)

    def _room_of(self, slot: int) -> int:
        """Return the number of positions that a slot has pages for."""
        return min(self._table[slot].num_pages * self._table.page_size, self._table.max_model_len)

    def _source(self, slot: int, position: int, run: _ComputedRows | None, num_rows: int) -> int:
        """Return the place of the hidden state of a position."""
        if run is not None and run.start <= position < run.end:
            return run.row + position - run.start
        return num_rows + (slot if self._known.get(slot) == position else self._table.num_slots)

    def _guess(
        self,
        model: DecoderModel,
        cache: KVViews,
        spans: Sequence[Span],
        rows: _NewEntries,
        states_SD: torch.Tensor,
        num_rows: int,
        on_layer: Callable[[int], None] | None,
    ) -> Guesses | None:
        sources: list[int] = []
        for span in spans:
            sources.append(self._source(span.slot, span.start - 1, None, num_rows))
            sources += range(span.row, span.row + span.length - 1)
            self._num_entries[span.slot] = max(self._num_entries[span.slot], span.start + span.length)
        batch, token_ids_T = self._table.batch_of(spans, rows.slots, rows.positions, FIRST_POSITION)
        sources_T = upload(sources + rows.sources, self._device)
        is_hole_T = sources_T == states_SD.shape[0] - 1
        hidden_TD = model.draft(token_ids_T, states_SD[sources_T], is_hole_T, batch, cache, on_layer)
        if not rows.newest:
            return None
        newest = [batch.decode_row + row for row in rows.newest.values()]
        return self._in_a_row(model, cache, list(rows.newest), hidden_TD[upload(newest, self._device)])

    def _in_a_row(
        self, model: DecoderModel, cache: KVViews, slots: list[int], hidden_RD: torch.Tensor
    ) -> Guesses | None:
        """Return what the layer drafts behind the newest tokens of these slots, with its results `hidden_RD` there."""
        of_tokens, tokens = list(slots), [self._drafted(model, hidden_RD)]
        for depth in range(self._most - 1):
            positions = [self._table[slot].num_tokens + depth for slot in slots]
            kept = [row for row, slot in enumerate(slots) if positions[row] < self._room_of(slot)]
            if not kept:
                break
            slots, positions = [slots[row] for row in kept], [positions[row] for row in kept]
            kept_R, where = upload(kept, self._device), upload([slots, positions], self._device)
            self._table.token_ids[where[0], where[1]] = tokens[-1][kept_R]
            batch, token_ids_R = self._table.batch_of((), slots, positions, FIRST_POSITION)
            before_RD, no_hole_R = (
                model.draft_normed(hidden_RD[kept_R]).clone(),
                torch.zeros_like(kept_R, dtype=torch.bool),
            )
            hidden_RD = model.draft(token_ids_R, before_RD, no_hole_R, batch, cache)
            of_tokens += slots
            tokens.append(self._drafted(model, hidden_RD))
        return Guesses(of_tokens, torch.cat(tokens)) if model.is_main else None

    def _drafted(self, model: DecoderModel, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return the tokens of rows, int64 `[R]`; on followers only if the layer goes on from there."""
        logits_RV = model.draft_logits(hidden_RD)
        tokens_R = torch.zeros(hidden_RD.shape[0], dtype=torch.int64, device=self._device)
        if logits_RV is not None:
            tokens_R = logits_RV.argmax(-1)
        return tokens_R if model.shard is None or self._most == 1 else model.shard.all_reduce(tokens_R)
