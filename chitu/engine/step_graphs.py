"""Steps that are recorded once and replayed (CUDA graphs): one launch for a whole forward.

A recording works on tensors at fixed addresses (`rows`, `tiles`, results), sized by a bucket. Rows of the scratch slot,
whose only page is the scratch page, pad a batch to its bucket. A decode recording ends by appending each row's greedy
token to its sequence and advancing the positions, so an unchanged batch needs nothing from the host. Owned by
`ModelRunner`, step thread only.

With several ranks a recording has their sums and gathers. Which steps are recorded, and in which order, follows from
the plans and from `record_all`, which all ranks call at the same place; so all record, and replay, the same steps. The
main rank alone has logits and tokens: the others append what it shares behind the replay (`shared_draws.py`).

A `Recorder` makes recordings: CUDA graphs, or (the twin, for tests without a GPU) the same function called again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from chitu.engine.batch import SlotTable, host_rows
from chitu.engine.executor import PrefillChunk
from chitu.engine.expert_group import ExpertGroup
from chitu.engine.sampling_ops import append_greedy_
from chitu.models.model import KVViews, Model
from chitu.ops.cuda_device import on_stream
from chitu.ops.interface import TILE_ROWS, Batch, Span, tiles_of

if TYPE_CHECKING:
    from chitu.ops.kernels.greedy import GreedyKernels

Replay = Callable[[], None]

DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PREFILL_SIZES = (64, 128, 256, 512, 1024, 2048)
"""Buckets in rows. Longer prefills are bound by arithmetic; recording them would save nothing."""
NO_SLOT = -1
SPARE_TILES = 8
"""Tiles beyond the full ones in a prefill recording: so many spans fit it, however they are cut."""


class Recorder(Protocol):
    def record(self, body: Callable[[], None]) -> Replay:
        """Run `body` until it is warm, record it, and return a function that runs it again on the same tensors."""
        ...


class EagerRecorder:
    """The twin of `CudaRecorder`: a recording is the function itself."""

    def record(self, body: Callable[[], None]) -> Replay:
        body()
        return body


class CudaRecorder:
    """A recorder of CUDA graphs. They never run concurrently, so they share one memory pool, and one stream to record
    on: torch keeps a workspace of cuBLAS (32 MiB on an H100) for each stream that had a matrix product. `has_ranks`:
    recordings have calls to other ranks. NCCL's threads then ask for events meanwhile, which must not end a capture."""

    def __init__(self, device: torch.device, has_ranks: bool = False) -> None:
        self._device = device
        self._mode = "thread_local" if has_ranks else "global"
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, body: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with on_stream(self._stream):
            for _ in range(2):  # compiles kernels, and lets libraries connect ranks and allocate what they keep
                body()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._mode):
                body()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class Recording:
    """How an executor records its steps: with which recorder, in which buckets."""

    recorder: Recorder
    decode_sizes: Sequence[int] = DECODE_SIZES
    prefill_sizes: Sequence[int] = PREFILL_SIZES
    """Buckets of prefills; empty if prefills are not recorded."""

    @classmethod
    def of(cls, recorder: Recorder, computes: bool) -> Recording:
        """Return what an instance records. One that does not compute prompts has some only after a step that raised."""
        return cls(recorder, prefill_sizes=PREFILL_SIZES if computes else ())


@dataclass(slots=True)
class _Decode:
    """A recording of `size` decoding rows."""

    rows_2B: torch.Tensor
    """Slots and positions of the rows."""
    replay: Replay
    logits_BV: torch.Tensor
    """With `tokens_B` without rows on all ranks but the main one."""
    tokens_B: torch.Tensor
    hidden_BD: torch.Tensor | None
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Host copy, with `slots`, of what `rows_2B` holds."""


@dataclass(slots=True)
class _Prefill:
    """A recording of `size` rows of spans."""

    rows_2T: torch.Tensor
    tiles_Y4: torch.Tensor
    replay: Replay
    hidden_TD: torch.Tensor


class StepGraphs:
    """The recordings of one model. `slots` must have a scratch slot. `keeps_hidden`: decodes give hidden states.
    `experts`: the ranks among which experts are spread. `greedy`: the kernels that end a decode; None for torch's
    operations."""

    def __init__(
        self,
        model: Model,
        slots: SlotTable,
        cache: KVViews,
        recording: Recording,
        keeps_hidden: bool = False,
        experts: ExpertGroup | None = None,
        greedy: GreedyKernels | None = None,
    ) -> None:
        self._append = append_greedy_ if greedy is None else greedy.append_
        self._model = model
        self._table = slots
        self._cache = cache
        self._recorder = recording.recorder
        self._keeps_hidden = keeps_hidden
        self._experts = experts
        self._decode_sizes = [size for size in recording.decode_sizes if size < slots.num_slots] + [slots.num_slots]
        self._prefill_sizes = list(recording.prefill_sizes)
        self._decodes: dict[int, _Decode] = {}
        self._prefills: dict[int, _Prefill] = {}

    def record_all(self, is_decoding: bool) -> None:
        """Record every bucket before the first request, the largest first: the smaller ones reuse its memory."""
        for size in reversed(self._prefill_sizes):
            self._prefills[size] = self._record_prefill(size)
        for size in reversed(self._decode_sizes) if is_decoding else ():
            self._decodes[size] = self._record_decode(size)

    # --------------------------------------------------------------------------------------------------------- decode

    @property
    def decode_sizes(self) -> Sequence[int]:
        """Rows of the recordings of decodes, ascending."""
        return self._decode_sizes

    @property
    def most_decode_rows(self) -> int:
        """Rows of the largest recording of decodes."""
        return self._decode_sizes[-1]

    def decode(
        self, slots: list[int], positions: list[int], least_rows: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Feed each slot's token at `positions`; a slot may have several. Replay at least `least_rows`.

        Return logits float32 `[B, V]`, greedy tokens int64 `[B]`, already appended to their sequences, with NO_TOKEN
        where none can be drawn, and the hidden states `[B, D]` of `forward`, if they are kept. The next call overwrites
        all. On all ranks but the main one B is 0 in logits and tokens.
        """
        size = next(size for size in self._decode_sizes if size >= max(len(slots), least_rows))
        recording = self._decodes.get(size)
        if recording is None:
            recording = self._decodes[size] = self._record_decode(size)
        if recording.slots != slots or recording.positions != positions:
            padding = size - len(slots)
            rows = [slots + [self._table.scratch_slot] * padding, positions + [0] * padding]
            recording.rows_2B.copy_(self._upload(rows), non_blocking=True)
            recording.slots = list(slots)
        recording.replay()
        recording.positions = [position + 1 for position in positions]
        hidden_BD = recording.hidden_BD[: len(slots)] if recording.hidden_BD is not None else None
        return recording.logits_BV[: len(slots)], recording.tokens_B[: len(slots)], hidden_BD

    def forget_rows(self) -> None:
        """Forget the host copies of the rows after a replay that raised: the state on the device is unknown."""
        for recording in self._decodes.values():
            recording.slots = [NO_SLOT]

    def _record_decode(self, size: int) -> _Decode:
        table = self._table
        rows_2B = torch.zeros(2, size, dtype=torch.int64, device=table.device)
        rows_2B[0] = table.scratch_slot
        num_drawn = size if self._model.is_main else 0
        logits_BV = torch.zeros(num_drawn, self._model.vocab_size, dtype=torch.float32, device=table.device)
        tokens_B = torch.zeros(num_drawn, dtype=torch.int64, device=table.device)
        kept_BD: torch.Tensor | None = None
        if self._keeps_hidden:
            kept_BD = torch.zeros(size, self._model.hidden_size, dtype=self._model.dtype, device=table.device)
        batch = Batch(
            slots_T=rows_2B[0],
            positions_T=rows_2B[1],
            page_table=table.page_table,
            spans=(),
            spans_X4=torch.zeros(0, 4, dtype=torch.int64),
            tiles_Y4=torch.zeros(0, 4, dtype=torch.int64, device=table.device),
            decode_row=0,
            decode_slots=(table.scratch_slot,) * size,
            max_decode_len=table.max_model_len,
        )

        def body() -> None:
            hidden_BD = self._forward(batch)
            if kept_BD is not None:
                kept_BD.copy_(hidden_BD)
            if self._model.logits(hidden_BD, logits_BV) is None:  # the tokens come from the main rank
                rows_2B[1] += rows_2B[0] != table.scratch_slot
                return
            self._append(logits_BV, rows_2B, table.token_ids, tokens_B, table.scratch_slot)

        return _Decode(rows_2B, self._recorder.record(body), logits_BV, tokens_B, kept_BD)

    # -------------------------------------------------------------------------------------------------------- prefill

    def fits(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Return whether a recording has room for these chunks."""
        num_rows = sum(chunk.length for chunk in chunks)
        tiles = sum(-(-chunk.length // TILE_ROWS) for chunk in chunks)
        size = next((size for size in self._prefill_sizes if size >= num_rows), None)
        return num_rows > 0 and size is not None and tiles <= size // TILE_ROWS + SPARE_TILES

    def prefill(self, spans: Sequence[Span]) -> torch.Tensor:
        """Return hidden states `[T, D]` of the rows of spans that fit, with K and V of all layers written into the
        pages. The next call overwrites the result."""
        num_rows = sum(span.length for span in spans)
        size, tiles = next(size for size in self._prefill_sizes if size >= num_rows), tiles_of(spans)
        recording = self._prefills.get(size)
        if recording is None:
            recording = self._prefills[size] = self._record_prefill(size)
        padding = size - num_rows
        rows = host_rows(spans, [self._table.scratch_slot] * padding, [0] * padding, self._table.device)
        recording.rows_2T.copy_(rows, non_blocking=True)
        empty = [(0, 0, 0, 0)] * (len(recording.tiles_Y4) - len(tiles))
        recording.tiles_Y4.copy_(self._upload([list(tile) for tile in [*tiles, *empty]]), non_blocking=True)
        recording.replay()
        return recording.hidden_TD[:num_rows]

    def _record_prefill(self, size: int) -> _Prefill:
        table = self._table
        rows_2T = torch.zeros(2, size, dtype=torch.int64, device=table.device)
        rows_2T[0] = table.scratch_slot
        tiles_Y4 = torch.zeros(size // TILE_ROWS + SPARE_TILES, 4, dtype=torch.int64, device=table.device)
        model = self._model
        hidden_TD = torch.zeros(size, model.hidden_size, dtype=model.dtype, device=table.device)
        batch = Batch(
            slots_T=rows_2T[0],
            positions_T=rows_2T[1],
            page_table=table.page_table,
            spans=(),
            spans_X4=torch.zeros(0, 4, dtype=torch.int64),
            tiles_Y4=tiles_Y4,
            decode_row=size,
            decode_slots=(),
            max_decode_len=0,
        )

        def body() -> None:
            hidden_TD.copy_(self._forward(batch))

        return _Prefill(rows_2T, tiles_Y4, self._recorder.record(body), hidden_TD)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Compute the rows of a recording."""
        token_ids_T = self._table.token_ids[batch.slots_T, batch.positions_T]
        if self._experts is None:
            return self._model.forward(token_ids_T, batch, self._cache)
        with self._experts.recorded(batch.slots_T != self._table.scratch_slot):
            return self._model.forward(token_ids_T, batch, self._cache)

    def _upload(self, values: list[list[int]]) -> torch.Tensor:
        """Return a host tensor, pinned on CUDA: a copy then does not wait, and torch keeps it until the copy ran."""
        return torch.tensor(values, dtype=torch.int64, pin_memory=self._table.device.type == "cuda")
