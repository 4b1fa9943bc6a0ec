"""FlashInfer as a library: checks that it is installed and fits, builds and tries its kernels before the first request.

It is optional (extra `gpu-flashinfer`). Unless its kernels are prebuilt, it compiles them on first use: some 100 s with
10 cores, which no request should wait for. So they are built at start-up, in a separate process that can be killed when
it takes too long, and a small batch is computed and compared with torch. On any failure our own kernel is used, with
one warning. Called once by the main thread of a rank, before weights are read.

`python -m chitu.ops.flashinfer_library DTYPE HEAD_DIM` builds the kernels; that process runs it, or an operator.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chitu.errors import ConfigError
from chitu.ops.flashinfer_prefill import DTYPES, HEAD_DIMS, FlashInferPrefill, PrefillWrapper
from chitu.ops.interface import Batch, HeadSpec, Span, tiles_of
from chitu.ops.torch_ops import TorchOps
from chitu.types import Ready

logger = logging.getLogger(__name__)

BUILD_LIMIT_S = 240.0
"""Timeout of the build. An H100's host with 10 jobs took 99 s."""
MIN_VERSION = (0, 6)
WORKSPACE_BYTES = 16 << 20
"""Workspace that both wrappers share. FA3 plans no partial results, so it needs almost none."""
CAPABILITY = (9, 0)
TOLERANCE = 0.02
"""Largest relative error of the trial (norm of the difference over norm of the expected). Rounding gives 0.003."""


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
        return f"it takes pages of bfloat16 or float16, not {shape.kv_dtype} for a model of {shape.dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))} numbers, not {shape.head_dim}"
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
    """Build what is missing, compute a small batch and compare. On any failure log one warning and return None."""
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
        run_bounded([sys.executable, "-m", "chitu.ops.flashinfer_library", name, str(shape.head_dim)], limit_s)

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
