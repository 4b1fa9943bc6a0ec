"""The operations on CPU in float32, with our own C kernels (`native.c`), for speed.

The machine's C compiler builds the library on first use, into the user's cache folder, named by the hash of source,
flags and CPU. Some virtual machines lack what they report: a process of its own tries what was built, and if a signal
ends that, it is built again without AVX-512. `load_library` returns None if there is no compiler, and `select.py` then
uses `TorchOps`. A build that takes too long is remembered beside it and not tried again for a day, or until that file
is removed. The library shares torch's OpenMP runtime: torch is loaded first, and both need `libgomp.so.1`.

On CPUs that convert float16, weights stay small: `KeptBlocks` as they are, and a float32 matrix in 16 bits if bfloat16
or float16 has exactly its numbers. Results have the same bits as those of float32.

Results are in buffers that the next call of the same operation reuses, so a step allocates almost nothing. A thread
has a `NativeOps` of its own (`beside`), and as many threads for a call as torch gives it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from chitu.ops.fp8_pages import is_fp8
from chitu.ops.interface import (
    Batch,
    ExpertBiases,
    ExpertWeights,
    HeadSpec,
    LatentHeads,
    LinearWeight,
    Ops,
    RotaryTable,
    Routes,
)
from chitu.ops.kept import Form, KeptBlocks, Matrix, Weights, in_16_bits
from chitu.ops.routing import Router, gated, route, rows_by_expert, weighted_sum
from chitu.ops.routing_rule import ClampedGate
from chitu.ops.torch_ops import TorchOps

logger = logging.getLogger(__name__)

PANEL = 32
HALF_FACTOR = 256.0
"""Factor of the scales of weights in e4m3: the kernel reads it as float16, which has another exponent."""
FOUR_BITS: tuple[Form, ...] = ("table4", "int4", "e2m1")
FORMS: dict[Form | torch.dtype, int] = {
    "e4m3": 0, "int8": 1, **dict.fromkeys(FOUR_BITS, 2), torch.bfloat16: 3, torch.float16: 4,
}  # fmt: skip
"""Forms of codes by the kernel's number."""
MAX_HEAD_DIM = 256
MAX_GROUP = 16
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
WITHOUT_AVX512 = "-mno-avx512f"
TRIAL = """
import ctypes, sys
library, integer = ctypes.CDLL(sys.argv[1]), ctypes.c_int64
numbers, codes = (ctypes.c_float * 4096)(), (ctypes.c_uint8 * 8192)()
sizes, rest = (integer(8), integer(64)), (None, numbers, integer(32), integer(0), integer(1))
library.chitu_linear(numbers, *sizes, codes, *rest)
for form in range(5 * library.chitu_keeps_small()):
    kept = integer(form), codes, numbers, codes, None, integer(0), integer(32)
    library.chitu_linear_kept(numbers, *sizes, *kept, *rest)
"""
"""Program that computes a product of each form with the library that it is given."""
STORE, ADD, GATE_UP = 0, 1, 2
COMPILE_TIMEOUT_S = 120
RETRY_S = 86400.0
"""Age at which a build that took too long is tried again."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "chitu_linear": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
    "chitu_rms_norm": [_POINTER, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT],
    "chitu_rope_append": [_POINTER] * 4 + [_FLOAT] + [_POINTER] * 5 + [_INT] + [_POINTER] * 2 + [_INT] * 6,
    "chitu_decode_attention": [_POINTER] * 7 + [_INT] * 6 + [_FLOAT, _INT, _POINTER, _INT],
    "chitu_prefill_attention": [_POINTER] * 5 + [_INT, _POINTER] + [_INT] * 5 + [_FLOAT, _INT, _POINTER, _INT],
}
_OF_SMALL = {
    "chitu_linear_kept": [_POINTER, _INT, _INT, _INT] + [_POINTER] * 4 + [_INT] * 2 + [_POINTER] * 2 + [_INT] * 3,
}
"""Only on CPUs that convert float16 to float32 (x86 with F16C)."""


def _cpu_flags() -> str:
    """Return what `-march=native` depends on: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def load_library(cache_folder: Path | None = None, timeout_s: float = COMPILE_TIMEOUT_S) -> ctypes.CDLL | None:
    """Return the compiled kernels, or None (and log one line) if they cannot be compiled or loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if platform.system() != "Linux" or compiler is None:
        logger.info("no C compiler found: using torch operations instead of the C kernels")
        return None
    source = Path(__file__).with_name("native.c")
    key = hashlib.sha256(source.read_bytes() + " ".join((compiler, *FLAGS, _cpu_flags())).encode()).hexdigest()[:16]
    folder = cache_folder or Path.home() / ".cache" / "chitu"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"native-{key}.so"
        slow = target.with_suffix(".slow")
        if not target.exists():
            if slow.exists() and time.time() - slow.stat().st_mtime < RETRY_S:
                raise OSError(f"{compiler} took too long before; to try again, remove {slow}")
            try:
                _compile(compiler, source, target, timeout_s)
            except subprocess.TimeoutExpired:
                slow.touch()
                raise
        library = ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("cannot load the C kernels, using torch operations instead: %s", error)
        return None
    library.chitu_keeps_small.argtypes, library.chitu_keeps_small.restype = [], _INT
    more = _OF_SMALL if library.chitu_keeps_small() else {}
    for name, argument_types in {**_SIGNATURES, **more}.items():
        function = getattr(library, name)
        function.argtypes, function.restype = argument_types, None
    return library


def _compile(compiler: str, source: Path, target: Path, timeout_s: float) -> None:
    """Compile beside the target, try it and rename, so that processes that start together never load a partial file."""
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        for more in ([], [WITHOUT_AVX512]):
            done = _run([compiler, *FLAGS, *more, str(source), "-o", partial, "-lm"], timeout_s)
            if done.returncode != 0:
                raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            trial = _run([sys.executable, "-I", "-c", TRIAL, partial], timeout_s)
            if trial.returncode >= 0:  # a library that cannot be loaded there may be loaded behind torch
                os.replace(partial, target)
                return
            logger.warning("signal %s ended the trial of the C kernels (flags %s)", -trial.returncode, more)
        raise OSError("the C kernels crash: the CPU lacks what it reports")
    finally:
        Path(partial).unlink(missing_ok=True)


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """What panels that are not float32 mean. Of 16 bits only the form counts."""

    form: Form | torch.dtype
    scales: torch.Tensor | None = None
    """`[panels, runs, 32]`, float16 or float32; of e4m3 times `HALF_FACTOR`."""
    added: torch.Tensor | None = None
    run: int = 0
    """Inputs that have the same scales."""
    table: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[int, ...]:
        """Return what the kernel gets behind the codes: table, scales, what is added, is float16, run."""
        pointers = (0 if each is None else each.data_ptr() for each in (self.table, self.scales, self.added))
        return (*pointers, self.scales is not None and self.scales.dtype == torch.float16, self.run)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[ceil(out / 32), in, 32]`, zero padded. With `gate_up`: 16 columns of gate, then 16 of up a panel."""

    panels: torch.Tensor
    """In pairs of output i and output i + 16: codes of 4 bits in a byte, `[ceil(out / 32), in, 16]`, the first in the
    low half; bfloat16 side by side."""
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    panels_pointer: int
    bias_pointer: int | None
    codes: PackedCodes | None = None
    """None if panels are float32."""
    kept_arguments: tuple[int, ...] = ()
    """Of the kernel: form, codes, and what says what these mean."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the numbers, without the bias."""
        more = () if self.codes is None else (self.codes.scales, self.codes.added)
        return sum(each.nbytes for each in (self.panels, *more) if each is not None)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Packed weights of each expert: gate and up, and down."""

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    gate: ClampedGate | None = None

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)


def pack(weight_OI: Matrix, bias_O: torch.Tensor | None, gate_up: bool = False, small: bool = True) -> PackedWeight:
    """Pack a `[out, in]` weight into panels. With `gate_up`, `out_features` is the result's width (half the rows).

    `small`: whether a tensor stays in 16 bits if it has the numbers of such.
    """
    codes = None
    if isinstance(weight_OI, KeptBlocks):
        weight_OI = weight_OI.with_scales_alone()
        numbers, codes = weight_OI.codes_OI.view(torch.uint8), _packed_codes(weight_OI, gate_up)
    elif small and (halves := in_16_bits(weight_OI)) is not None:
        numbers, codes = halves, PackedCodes(halves.dtype)
    else:
        numbers = weight_OI
    out_features, in_features = numbers.shape
    panels = _panels(numbers, gate_up)
    if codes is not None and codes.form in (*FOUR_BITS, torch.bfloat16):
        low, high = panels.chunk(2, dim=2)
        panels = low | high << 4 if codes.form in FOUR_BITS else torch.stack((low, high), dim=3).flatten(2)
    if gate_up:
        bias_O = None if bias_O is None else _interleave(bias_O.unsqueeze(1)).squeeze(1)
        out_features //= 2
    if bias_O is not None:
        bias_O = torch.nn.functional.pad(bias_O, (0, panels.shape[0] * PANEL - bias_O.shape[0])).contiguous()
    bias_pointer, pointer = None if bias_O is None else bias_O.data_ptr(), panels.data_ptr()
    arguments = () if codes is None else (FORMS[codes.form], pointer, *codes.arguments)
    return PackedWeight(panels, bias_O, out_features, in_features, pointer, bias_pointer, codes, arguments)


def _packed_codes(weight: KeptBlocks, gate_up: bool) -> PackedCodes:
    scales = weight.scales_OR * HALF_FACTOR if weight.form == "e4m3" else weight.scales_OR
    added = None if weight.added_OR is None else _panels(weight.added_OR, gate_up)
    table = torch.tensor(weight.table, dtype=torch.float32) if weight.table else None
    return PackedCodes(weight.form, _panels(scales, gate_up), added, weight.run, table)


def _panels(rows_OI: torch.Tensor, gate_up: bool) -> torch.Tensor:
    """Return rows as panels `[ceil(out / 32), in, 32]`."""
    if gate_up:
        rows_OI = _interleave(rows_OI)
    padding = -rows_OI.shape[0] % PANEL
    padded = torch.nn.functional.pad(rows_OI, (0, 0, 0, padding)) if padding else rows_OI
    return padded.view(-1, PANEL, rows_OI.shape[1]).transpose(1, 2).contiguous()


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Return `[gate; up]` as alternating half panels, each half padded with zeros."""
    half = PANEL // 2
    padding = -(rows.shape[0] // 2) % half
    gate, up = (
        torch.nn.functional.pad(part, (0, 0, 0, padding)).view(-1, half, rows.shape[1]) for part in rows.chunk(2)
    )
    return torch.stack((gate, up), dim=1).view(-1, rows.shape[1])


def unpack(weight: PackedWeight, half: int | None = None) -> torch.Tensor:
    """Return the weight `[out, in]` in the order of torch; of gate and up, the gate (0) or the up (1)."""
    rows = torch.arange(weight.out_features)
    if half is None:
        return _rows_at(weight, rows // PANEL, rows % PANEL)
    width = PANEL // 2
    return _rows_at(weight, rows // width, rows % width + half * width)


def _rows_at(weight: PackedWeight, panels_T: torch.Tensor, lanes_T: torch.Tensor) -> torch.Tensor:
    """Return rows by their panels and their places in these, float32 `[T, in]`."""
    codes, half = weight.codes, PANEL // 2
    if codes is None or codes.scales is None or isinstance(codes.form, torch.dtype):
        is_paired = codes is not None and codes.form == torch.bfloat16
        places_T = lanes_T % half * 2 + lanes_T // half if is_paired else lanes_T
        return weight.panels[panels_T, :, places_T].float()
    if codes.form in FOUR_BITS:
        codes_TI = (
            weight.panels[panels_T, :, lanes_T % half] >> (lanes_T // half * 4).to(torch.uint8).unsqueeze(1) & 0xF
        )
    else:
        codes_TI = weight.panels[panels_T, :, lanes_T]
    scales = codes.scales[panels_T, :, lanes_T]
    return KeptBlocks(
        codes.form,
        codes_TI,
        scales / HALF_FACTOR if codes.form == "e4m3" else scales,
        codes.run,
        None if codes.added is None else codes.added[panels_T, :, lanes_T],
        () if codes.table is None else tuple(codes.table.tolist()),
    ).dequantise()


def _each(biases_EO: torch.Tensor | None) -> Iterable[torch.Tensor | None]:
    return repeat(None) if biases_EO is None else biases_EO


def packed(weight: LinearWeight) -> PackedWeight:
    """Return the weight as this module prepared it. Raises TypeError if another implementation prepared it."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight prepared by another implementation: {type(weight).__name__}")
    return weight


class NativeOps(Ops):
    """An `Ops`. Head sizes that the kernels do not support, pages of e4m3 and latent attention go through
    `TorchOps`."""

    name = "native"

    def __init__(self, library: ctypes.CDLL, reuses_buffers: bool = True) -> None:
        self._library = library
        self._reuses_buffers = reuses_buffers
        self._fallback = TorchOps()
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    def beside(self) -> NativeOps:
        return NativeOps(self._library, self._reuses_buffers)

    def with_new_results(self) -> NativeOps:
        """Return operations whose results are new tensors, for those who keep several of one operation."""
        return NativeOps(self._library, reuses_buffers=False)

    @property
    def keeps_small(self) -> bool:
        """Whether weights stay in 16, 8 or 4 bits, which depends on the CPU."""
        return bool(self._library.chitu_keeps_small())

    def keeps(self, form: Form, run: int, inputs: int) -> bool:
        return self.keeps_small

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> PackedWeight:
        return pack(weight, bias, small=self.keeps_small)

    def prepare_gate_up(self, weight: Matrix, bias: torch.Tensor | None) -> PackedWeight:
        return pack(weight, bias, gate_up=True, small=self.keeps_small)

    def rows_of(self, weight: LinearWeight, rows_T: torch.Tensor) -> torch.Tensor:
        return _rows_at(packed(weight), rows_T // PANEL, rows_T % PANEL)

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._linear(x_TI, packed(weight), STORE, None)

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor:
        return self._linear(x_TI, packed(weight), ADD, residual_TD)

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._linear(x_TD, packed(weight), GATE_UP, None)

    def gate_and_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        w = packed(weight)
        both = replace(w, out_features=w.panels.shape[0] * PANEL)
        halves_TP2H = self._linear(x_TD, both, STORE, None).view(x_TD.shape[0], -1, 2, PANEL // 2)
        return torch.cat([half.flatten(1)[:, : w.out_features] for half in halves_TP2H.unbind(2)], dim=1)

    def prepare_experts(
        self,
        gate_up_EGD: Weights,
        down_EDI: Weights,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> ExpertWeights:
        of_gate_up, of_down = (None, None) if biases is None else biases
        gate_up = tuple(map(self.prepare_gate_up, gate_up_EGD, _each(of_gate_up)))
        return PackedExperts(gate_up, tuple(map(self.prepare, down_EDI, _each(of_down))), gate)

    def route(self, x_TD: torch.Tensor, router: Router) -> Routes:
        return route(x_TD, router)

    def mixture(self, x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
        if not isinstance(experts, PackedExperts):
            raise TypeError(f"experts prepared by another implementation: {type(experts).__name__}")
        per_row = routes.experts_TA.shape[1]
        y_RD = x_TD.new_empty(routes.experts_TA.numel(), x_TD.shape[1])
        for expert, pairs in rows_by_expert(routes, experts.num_experts):
            if expert == experts.num_experts:
                y_RD[pairs] = 0
                continue
            x_ND, gate_up = x_TD[pairs // per_row], experts.gate_up[expert]
            if experts.gate is None:
                inner_NI = self.gate_up(x_ND, gate_up)
            else:
                gate_NI, up_NI = self.gate_and_up(x_ND, gate_up).chunk(2, dim=1)
                inner_NI = gated(gate_NI, up_NI, experts.gate)
            y_RD[pairs] = self.linear(inner_NI, experts.down[expert])
        return weighted_sum(y_RD, routes)

    def _linear(self, x_TI: torch.Tensor, weight: PackedWeight, mode: int, result: torch.Tensor | None) -> torch.Tensor:
        rows = x_TI.shape[0]
        x_TI = x_TI.contiguous()
        if result is None:
            # One an operation: a tensor-parallel rank's `gate_up` may be as wide as the `linear` that reads its result.
            result = self._buffer(f"linear{mode}/{weight.out_features}", rows, weight.out_features)
        if weight.kept_arguments:
            self._library.chitu_linear_kept(
                x_TI.data_ptr(),
                rows,
                weight.in_features,
                *weight.kept_arguments,
                weight.bias_pointer,
                result.data_ptr(),
                weight.out_features,
                mode,
                torch.get_num_threads(),
            )
            return result
        self._library.chitu_linear(
            x_TI.data_ptr(),
            rows,
            weight.in_features,
            weight.panels_pointer,
            weight.bias_pointer,
            result.data_ptr(),
            weight.out_features,
            mode,
            torch.get_num_threads(),
        )
        return result

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x_TD.shape
        x_TD = x_TD.contiguous()
        out = self._buffer("norm", rows, width)
        self._library.chitu_rms_norm(
            x_TD.data_ptr(),
            weight_D.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_append(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
    ) -> torch.Tensor:
        if is_fp8(k_PKSN):
            return self._fallback.rope_append(qkv_TC, heads, rotary, batch, k_PKSN, v_PKSN)
        rows, head_dim = qkv_TC.shape[0], heads.head_dim
        q_TC = self._buffer("q", rows, heads.num_heads * head_dim)
        self._library.chitu_rope_append(
            qkv_TC.data_ptr(),
            q_TC.data_ptr(),
            None if heads.q_norm_N is None else heads.q_norm_N.data_ptr(),
            None if heads.k_norm_N is None else heads.k_norm_N.data_ptr(),
            heads.eps,
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            batch.slots_T.data_ptr(),
            batch.positions_T.data_ptr(),
            batch.page_table.data_ptr(),
            batch.page_table.shape[1],
            k_PKSN.data_ptr(),
            v_PKSN.data_ptr(),
            rows,
            heads.num_heads,
            heads.num_kv_heads,
            head_dim,
            k_PKSN.shape[2],
            torch.get_num_threads(),
        )
        return q_TC.view(rows, heads.num_heads, head_dim)

    def attention(
        self, q_THN: torch.Tensor, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor
    ) -> torch.Tensor:
        rows, num_heads, head_dim = q_THN.shape
        group = num_heads // heads.num_kv_heads
        if head_dim % PANEL or head_dim > MAX_HEAD_DIM or group > MAX_GROUP or is_fp8(k_PKSN):
            return self._fallback.attention(q_THN, heads, batch, k_PKSN, v_PKSN)
        out = self._buffer("mixed", rows, num_heads * head_dim)
        shape = (num_heads, heads.num_kv_heads, head_dim, k_PKSN.shape[2], head_dim**-0.5)
        more = heads.window or 0, None if heads.sinks_H is None else heads.sinks_H.data_ptr(), torch.get_num_threads()
        pages = k_PKSN.data_ptr(), v_PKSN.data_ptr()
        table = batch.page_table.data_ptr(), batch.page_table.shape[1]
        if batch.spans:
            spans = batch.spans_X4
            self._library.chitu_prefill_attention(
                q_THN.data_ptr(), out.data_ptr(), *pages, spans.data_ptr(), spans.shape[0], *table, *shape, *more
            )
        if batch.decode_slots:
            row = batch.decode_row
            skipped = row * num_heads * head_dim * 4
            self._library.chitu_decode_attention(
                q_THN.data_ptr() + skipped,
                out.data_ptr() + skipped,
                *pages,
                batch.slots_T.data_ptr() + row * 8,
                batch.positions_T.data_ptr() + row * 8,
                *table,
                rows - row,
                *shape,
                *more,
            )
        return out

    def latent_append(
        self, kv_TC: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch, pages_PKSC: torch.Tensor
    ) -> None:
        self._fallback.latent_append(kv_TC, heads, rotary, batch, pages_PKSC)

    def latent_query(
        self, q_THE: torch.Tensor, key_HNL: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch
    ) -> torch.Tensor:
        return self._fallback.latent_query(q_THE, key_HNL, heads, rotary, batch)

    def latent_attention(
        self, q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor
    ) -> torch.Tensor:
        return self._fallback.latent_attention(q_THC, heads, batch, pages_PKSC)

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Return a contiguous `[rows, width]` view of this name's buffer, which grows to the largest step so far.
        Return a new tensor if buffers are not reused."""
        if not self._reuses_buffers:
            return torch.empty(rows, width)
        view = self._views.get(name)
        if view is not None and view.shape == (rows, width):
            return view
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            buffer = self._buffers[name] = torch.empty(rows * width, dtype=torch.float32)
        view = self._views[name] = buffer[: rows * width].view(rows, width)
        return view
