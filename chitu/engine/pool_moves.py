"""What a plan moves in the pool before it computes: pages, state rows, and sequences that give way to others, to the
host and back. Called by `ModelRunner`, step thread only; only `save` waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from chitu.engine.batch import SlotTable, upload, upload_tensor
from chitu.engine.executor import CopyPage, CopyState, KeepState, StepPlan
from chitu.errors import Internal
from chitu.kv_cache.pool import KVPool
from chitu.kv_cache.state_row import StateStamp
from chitu.ops.interface import Span


class _Saved(NamedTuple):
    """Host copy of what a retracted sequence had."""

    kv_len: int
    pages: list[torch.Tensor]
    """For each shape of regions `[regions, pages, ...]`."""
    state: torch.Tensor | None
    """Its state row; None without one."""


class PoolMoves:
    def __init__(self, table: SlotTable, pool: KVPool) -> None:
        self._table = table
        self._pool = pool
        self._saved: dict[int, _Saved] = {}
        self._kept: dict[int, StateStamp] = {}
        """Stamps of the state rows that plans have kept, as on the device once what is launched is done."""

    @property
    def saved_keys(self) -> frozenset[int]:
        return frozenset(self._saved)

    def drop(self, key: int) -> None:
        """Drop a saved sequence, if there is one."""
        self._saved.pop(key, None)

    def clear(self) -> None:
        """Drop all saved sequences."""
        self._saved.clear()

    def take_state(self, row: int, is_new: bool) -> None:
        """Give a state row to a sequence, which begins with nothing if it is new."""
        self._kept.pop(row, None)
        if is_new:  # also of NaN that the former owner may have left
            self._pool.state_rows[row].zero_()

    def move(self, plan: StepPlan) -> None:
        """Copy pages, then state rows, keep rows, and restore saved sequences, whose copies are dropped. Raises
        Internal if a state row or a saved sequence is not what the plan takes it for."""
        if plan.copy:
            self._copy_pages(plan.copy)
        for copy in plan.copy_state:
            self._copy_state(copy)
        for keep in plan.keep_state:
            self._keep_state(keep)
        for restore in plan.restore:
            self._restore(restore.slot, restore.key)

    def stamp(self, spans: Sequence[Span]) -> None:
        """Stamp the state rows of computed chunks, behind the writes to them (`state_row.py`). Decode steps stamp
        nothing: a row leaves an instance only with the last chunk of a prompt."""
        stamps = self._table.stamps(spans)
        rows_XB = torch.frombuffer(bytearray(b"".join(stamp.pack() for _, stamp in stamps)), dtype=torch.uint8)
        rows_XB = upload_tensor(rows_XB.view(len(stamps), -1), self._pool.device)
        self._pool.state_rows[upload([row for row, _ in stamps], self._pool.device), : rows_XB.shape[1]] = rows_XB

    def save(self, slot: int, key: int) -> None:
        """Copy what a slot has to the host, under a key. Waits for the device. Raises Internal if the key is used."""
        if key in self._saved:
            raise Internal(f"key {key} holds a saved sequence already")
        kv_len, state_slot = self._table[slot].kv_len, self._table[slot].state_slot
        pages = self._table.pages_of(slot, kv_len)
        regions = self._pool.regions
        shapes = self._pool.layout.shapes
        content = [torch.stack([regions[index][pages] for index in shape.regions]).cpu() for shape in shapes]
        state = self._pool.state_rows[state_slot].clone().cpu() if state_slot >= 0 else None
        self._saved[key] = _Saved(kv_len, content, state)

    def _copy_state(self, copy: CopyState) -> None:
        sequence = self._table[copy.slot]
        if sequence.kv_len < sequence.num_tokens:
            wanted, found = StateStamp(sequence.kv_len, sequence.digest), self._kept.get(copy.source)
            if found != wanted:
                raise Internal(f"slot {copy.slot}: state row {copy.source} holds {found}, not {wanted}")
        self._pool.state_rows[sequence.state_slot] = self._pool.state_rows[copy.source]

    def _keep_state(self, keep: KeepState) -> None:
        sequence = self._table[keep.slot]
        if sequence.kv_len != keep.num_tokens or keep.target == sequence.state_slot:
            raise Internal(f"{keep}, but slot {keep.slot} is {sequence.kv_len} tokens in row {sequence.state_slot}")
        self._kept[keep.target] = StateStamp(sequence.kv_len, sequence.digest)
        self._pool.state_rows[keep.target] = self._pool.state_rows[sequence.state_slot]

    def _copy_pages(self, copies: Sequence[CopyPage]) -> None:
        sources, targets = upload([[c.source for c in copies], [c.target for c in copies]], self._pool.device)
        for region in self._pool.regions:
            region[targets] = region[sources]

    def _restore(self, slot: int, key: int) -> None:
        if key not in self._saved:
            raise Internal(f"key {key} holds no saved sequence")
        saved, sequence = self._saved[key], self._table[slot]
        if saved.kv_len != sequence.kv_len or (saved.state is None) != (sequence.state_slot < 0):
            raise Internal(f"slot {slot}: admitted as {sequence}, but {saved.kv_len} tokens were saved")
        pages = self._table.pages_of(slot, saved.kv_len)
        if saved.state is not None:
            self._pool.state_rows[sequence.state_slot] = saved.state.to(self._pool.device, non_blocking=True)
        for shape, content in zip(self._pool.layout.shapes, saved.pages, strict=True):
            on_device = content.to(self._pool.device, non_blocking=True)
            for place, index in enumerate(shape.regions):
                self._pool.regions[index][pages] = on_device[place]
        del self._saved[key]
