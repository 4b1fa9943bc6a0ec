"""Attention of prefill spans by FlashInfer's FA3 kernels, straight from the pages.

Owns the library's inputs: which rows belong to which sequence, and which pages hold its keys. They are planned once a
step and used by every layer. The host knows all of them except the page numbers, which are copied on the device, so
planning waits for nothing. Called by `TritonOps` on the step thread, for steps that are not recorded.

Invariant: a wrapper's pinned memory is not written again before the copy out of it has run. There are two wrappers,
used in turn, each with an event behind its copies.

Source: the documentation of `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, 0.6.12 and 0.7.2. Both versions of `plan`
and `run` take the arguments used here.

*The library* is found, checked, built and tried before the first request. It is optional (extra `gpu-flashinfer`).
Unless its kernels are prebuilt, it compiles them on first use: some 100 s with 10 cores, which no request should wait
for. So they are built at start-up, in a separate process that can be killed when it takes too long, and a small batch
is computed and compared with torch. On any failure our own kernel is used, with one warning. Called once by the main
thread of a rank, before weights are read.

`python -m chitu.ops.flashinfer_prefill DTYPE HEAD_DIM` builds the kernels; that process runs it, or an operator.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chitu.errors import ConfigError, Internal
from chitu.ops.interface import Batch, HeadSpec, Span, tiles_of
from chitu.ops.torch_ops import TorchOps
from chitu.types import Ready

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
MIN_ROWS = 256
MAX_TILES = 250_000
"""Most heads times tiles of 128 rows: the library keeps 28 bytes of each in a workspace of 8 MiB."""
TILE_ROWS = 128
BUILD_LIMIT_S = 240.0
"""Timeout of the build. An H100's host with 10 jobs took 99 s."""
MIN_VERSION = (0, 6)
WORKSPACE_BYTES = 16 << 20
"""Workspace that both wrappers share. FA3 plans no partial results, so it needs almost none."""
CAPABILITY = (9, 0)
TOLERANCE = 0.02
"""Largest relative error of the trial (norm of the difference over norm of the expected). Rounding gives 0.003."""


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


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Attention shape of a rank: heads of its part of the model, page size, dtypes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Dtype of the pages; differs from `dtype` if they are quantised."""


class Library(Protocol):
    """The parts of an installed FlashInfer that are used. Its errors propagate unchanged."""

    def is_built(self, shape: PrefillShape) -> bool: ...

    def build(self, shape: PrefillShape, limit_s: float) -> None: ...

    def wrapper(self, device: torch.device) -> Callable[[], PrefillWrapper]:
        """Return a function that makes wrappers, which share a workspace."""
        ...


def why_not(shape: PrefillShape, capability: tuple[int, int], is_installed: bool) -> str | None:
    """Return the reason why this rank cannot use FlashInfer, or None."""
    if not is_installed:
        return "flashinfer is not installed (extra gpu-flashinfer)"
    if capability != CAPABILITY:
        return f"its FA3 kernels are for compute capability 9.0, the device has {capability[0]}.{capability[1]}"
    if shape.dtype not in DTYPES or shape.kv_dtype != shape.dtype:
        return f"it supports pages of bfloat16 or float16, not {shape.kv_dtype} for a model of {shape.dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it supports heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {shape.head_dim}"
    return None


def open_flashinfer(
    wanted: str, shape: PrefillShape, device: torch.device, limit_s: float = BUILD_LIMIT_S
) -> FlashInferPrefill | None:
    """Return FlashInfer's prefill on a CUDA device, built and tried, or None if our own kernel is used.

    `wanted`: `model.prefill_attention`. Raises ConfigError if that is `flashinfer` and FlashInfer cannot be used.
    """
    if wanted == "paged":
        return None
    reason = why_not(
        shape, torch.cuda.get_device_capability(device), importlib.util.find_spec("flashinfer") is not None
    )
    if reason is not None:
        if wanted == "flashinfer":
            raise ConfigError(f"model.prefill_attention is flashinfer, but {reason}")
        logger.info("prefill attention: our own kernel; %s", reason)
        return None
    prefill = try_library(InstalledLibrary, shape, device, limit_s)
    if prefill is None and wanted == "flashinfer":
        raise ConfigError("model.prefill_attention is flashinfer, but it does not work here: see the warning above")
    return prefill


def try_library(
    make: Callable[[], Library], shape: PrefillShape, device: torch.device, limit_s: float
) -> FlashInferPrefill | None:
    """Build missing kernels, compute a small batch and compare. On any failure log one warning and return None."""
    start_s = time.monotonic()
    try:
        library = make()
        if not library.is_built(shape):
            logger.info("prefill attention: building FlashInfer's kernels, which takes %.0f s at most", limit_s)
            library.build(shape, limit_s)
        prefill = FlashInferPrefill(library.wrapper(device), lambda: _mark(device))
        error = trial_error(prefill, shape, device)
        if not error <= TOLERANCE:
            raise RuntimeError(f"its result for a small batch has a relative error of {error:.3g} against torch")
    except Exception as error:  # an external library, of any version, with a compiler behind it
        logger.warning(
            "prefill attention: our own kernel, because FlashInfer failed: %s: %s", type(error).__name__, error
        )
        return None
    logger.info("prefill attention: FlashInfer FA3, ready after %.1f s", time.monotonic() - start_s)
    return prefill


def trial_error(prefill: FlashInferPrefill, shape: PrefillShape, device: torch.device) -> float:
    """Return the relative error, against torch in float32, of a prompt and a chunk behind a prefix, pages shuffled."""
    size, source = shape.page_size, torch.Generator().manual_seed(0)
    spans = (Span(0, 150, 1, 0), Span(150, 131, 0, 2 * size + 1))
    pages_each = -(-max(span.start + span.length for span in spans) // size)
    table = torch.randperm(2 * pages_each, generator=source).view(2, pages_each)
    num_rows = sum(span.length for span in spans)
    region = (2, 2 * pages_each, shape.num_kv_heads, size, shape.head_dim)
    k_PKSN, v_PKSN = torch.randn(region, generator=source).to(device, shape.dtype)
    q_THN = torch.randn(num_rows, shape.num_heads, shape.head_dim, generator=source).to(device, shape.dtype)
    batch = Batch(
        slots_T=torch.tensor([s.slot for s in spans for _ in range(s.length)], device=device),
        positions_T=torch.tensor([s.start + i for s in spans for i in range(s.length)], device=device),
        page_table=table.to(device),
        spans=spans,
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64, device=device),
        decode_row=num_rows,
        decode_slots=(),
        max_decode_len=0,
    )
    heads = HeadSpec(shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-6)
    if not prefill.takes(q_THN, k_PKSN, spans):
        raise RuntimeError(f"it does not support {shape}")
    out_THN = torch.full_like(q_THN, float("nan"))
    prefill.attention(q_THN, heads, batch, k_PKSN, v_PKSN, out_THN)
    expected = TorchOps().attention(q_THN.float(), heads, batch, k_PKSN.float(), v_PKSN.float())
    return float((out_THN.float().view_as(expected) - expected).norm() / expected.norm())


class InstalledLibrary:
    """The installed package. Raises RuntimeError if its version is too old."""

    def __init__(self) -> None:
        self._flashinfer: Any = importlib.import_module("flashinfer")
        version = str(self._flashinfer.__version__)
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
            raise RuntimeError(f"FlashInfer {version} is too old, 0.6 is needed")

    def is_built(self, shape: PrefillShape) -> bool:
        return bool(_module_of(shape.dtype, shape.head_dim).is_compiled)

    def build(self, shape: PrefillShape, limit_s: float) -> None:
        name = str(shape.dtype).removeprefix("torch.")
        run_bounded([sys.executable, "-m", "chitu.ops.flashinfer_prefill", name, str(shape.head_dim)], limit_s)

    def wrapper(self, device: torch.device) -> Callable[[], PrefillWrapper]:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

        def make() -> PrefillWrapper:
            found: PrefillWrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "HND", backend="fa3"
            )
            return found

        return make


def run_bounded(command: list[str], limit_s: float) -> None:
    """Run a command; kill it and its children after `limit_s`. Raises RuntimeError, with its last line if it failed."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"the build took more than {limit_s:.0f} s") from None
            raise
    if process.returncode:
        raise RuntimeError(f"the build failed: {(said.strip().splitlines() or ['no output'])[-1]}")


def _module_of(dtype: torch.dtype, head_dim: int) -> Any:
    """Return FlashInfer's spec of the module that a wrapper's `plan` loads for this case."""
    jit = importlib.import_module("flashinfer.jit")
    return jit.gen_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
    )


def _mark(device: torch.device) -> Ready | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _build_here(dtype: str, head_dim: int) -> None:
    """Build in the separate process. Its compilers end with it, and it ends with its parent."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)
    _module_of(getattr(torch, dtype), head_dim).build_and_load()


if __name__ == "__main__":
    _build_here(sys.argv[1], int(sys.argv[2]))
