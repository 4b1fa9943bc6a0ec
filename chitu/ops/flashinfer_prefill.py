"""Attention of prefill spans by FlashInfer's FA3 kernels, straight from the pages.

Owns the library's inputs: which rows belong to which sequence, and which pages hold its keys. They are planned once a
step and used by every layer. The host knows all of them except the page numbers, which are copied on the device, so
planning waits for nothing. `flashinfer_library.py` finds and checks the library. Called by `TritonOps` on the step
thread, for steps that are not recorded.

Invariant: a wrapper's pinned memory is not written again before the copy out of it has run. There are two wrappers,
used in turn, each with an event behind its copies.

Source: the documentation of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, 0.6.12 and 0.7.2. Both versions of `plan`
and `run` take the arguments used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chitu.errors import Internal
from chitu.ops.interface import Batch, HeadSpec, Span
from chitu.types import Ready

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
MIN_ROWS = 256
MAX_TILES = 250_000
"""Most heads times tiles of 128 rows: the library keeps 28 bytes of each in a workspace of 8 MiB."""
TILE_ROWS = 128


class PrefillWrapper(Protocol):
    """The part of FlashInfer's wrapper that is used here."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        max_token_per_sequence: int,
        seq_lens: torch.Tensor,
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        enable_pdl: bool,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class PageLists:
    """Places of the queries and keys of B spans, in the library's format."""

    row_starts: list[int]
    """Row offsets `[B + 1]`: span i has the rows `[row_starts[i], row_starts[i + 1])`."""
    page_starts: list[int]
    """Offsets `[B + 1]` into the list of pages, in the same way."""
    last_page_tokens: list[int]
    """Number of keys in each span's last page, `[B]`, from 1 to the page size."""
    num_keys: list[int]
    """Number of keys of each span's last row, `[B]`."""


def page_lists(spans: Sequence[Span], page_size: int) -> PageLists:
    """Return the lists of spans with consecutive rows from row 0 on, as in a batch. Raises Internal for other spans."""
    row_starts, page_starts, num_keys = [0], [0], []
    for span in spans:
        if span.row != row_starts[-1]:
            raise Internal(f"{span} does not begin at row {row_starts[-1]}")
        row_starts.append(span.row + span.length)
        num_keys.append(span.start + span.length)
        page_starts.append(page_starts[-1] - -num_keys[-1] // page_size)
    return PageLists(row_starts, page_starts, [(keys - 1) % page_size + 1 for keys in num_keys], num_keys)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a wrapper's kernels; by default, those of FA3."""

    dtypes: tuple[torch.dtype, ...] = DTYPES
    head_dims: tuple[int, ...] = HEAD_DIMS
    min_rows: int = MIN_ROWS
    """A step of fewer rows is not worth its plan (0.2 to 0.5 ms on the host). The size at which our own kernel is as
    fast was not measured."""


@dataclass(slots=True)
class _Turn:
    wrapper: PrefillWrapper
    copied: Ready | None = None
    """Event behind the copies of its last plan."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a batch. Holds the batch, so that no other batch can be taken for it."""

    batch: Batch
    kind: tuple[object, ...]
    wrapper: PrefillWrapper
    num_rows: int


class FlashInferPrefill:
    """Prefill attention by FlashInfer. `make_wrapper`: makes a wrapper for pages with the heads outside the tokens
    (`HND`). `mark`: makes an event behind all that was launched so far, or None on a device without a queue."""

    def __init__(
        self, make_wrapper: Callable[[], PrefillWrapper], mark: Callable[[], Ready | None], limits: Limits | None = None
    ) -> None:
        self._turns = [_Turn(make_wrapper()), _Turn(make_wrapper())]
        self._mark = mark
        self._limits = limits or Limits()
        self._plan: _Plan | None = None

    def takes(self, q_THN: torch.Tensor, k_PKSN: torch.Tensor, spans: Sequence[Span]) -> bool:
        """Return whether the library takes these spans: many rows, plain pages of its dtypes and head sizes."""
        limits, num_rows = self._limits, sum(span.length for span in spans)
        tiles = q_THN.shape[1] * (num_rows // TILE_ROWS + len(spans))
        return (
            num_rows >= limits.min_rows
            and tiles <= MAX_TILES
            and q_THN.dtype in limits.dtypes
            and k_PKSN.dtype == q_THN.dtype
            and k_PKSN.shape[-1] == q_THN.shape[-1]
            and q_THN.shape[-1] in limits.head_dims
        )

    def attention(
        self,
        q_THN: torch.Tensor,
        heads: HeadSpec,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
        out_THN: torch.Tensor,
    ) -> None:
        """Compute all spans' rows over their slots' keys up to their own positions, into the same rows of `out`."""
        kind = (heads.num_heads, heads.num_kv_heads, heads.head_dim, k_PKSN.shape[2], q_THN.dtype)
        plan = self._plan
        if plan is None or plan.batch is not batch or plan.kind != kind:
            plan = self._plan = self._make_plan(batch, heads, k_PKSN, kind)
        rows = slice(0, plan.num_rows)
        plan.wrapper.run(q_THN[rows], (k_PKSN, v_PKSN), out=out_THN[rows], enable_pdl=False)

    def _make_plan(self, batch: Batch, heads: HeadSpec, k_PKSN: torch.Tensor, kind: tuple[object, ...]) -> _Plan:
        turn = self._turns[0]
        self._turns.reverse()
        if turn.copied is not None:
            turn.copied.synchronize()  # two steps ago: it has passed
        spans, page_size = batch.spans, k_PKSN.shape[2]
        lists = page_lists(spans, page_size)
        counts = [lists.row_starts, lists.page_starts, lists.last_page_tokens, lists.num_keys]
        # In pinned memory and int32, as the library needs: it copies from here, and also reads here directly.
        host = torch.tensor(list(itertools.chain(*counts)), dtype=torch.int32, pin_memory=k_PKSN.device.type == "cuda")
        row_starts, page_starts, last_page_tokens, num_keys = torch.split(host, [len(count) for count in counts])
        per_span = [
            batch.page_table[span.slot, : end - start]
            for span, start, end in zip(spans, lists.page_starts, lists.page_starts[1:], strict=False)
        ]
        turn.wrapper.plan(
            row_starts,
            page_starts,
            torch.cat(per_span).to(torch.int32),
            last_page_tokens,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            page_size,
            causal=True,
            q_data_type=k_PKSN.dtype,
            kv_data_type=k_PKSN.dtype,
            max_token_per_sequence=max(span.length for span in spans),
            seq_lens=num_keys,
        )
        turn.copied = self._mark()
        return _Plan(batch, kind, turn.wrapper, lists.row_starts[-1])
