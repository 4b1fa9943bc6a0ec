"""Shared by every part of `chitu bench gpu`: the device and how time is measured on it, sizes, the rows of the result.

On a GPU, time is the device's own (events), and steps are CUDA graphs. On a CPU, Triton's interpreter runs the same
kernels and the eager twin the same steps, with tiny sizes: this shows that the benchmark runs; its figures mean
nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from chitu.engine.step_graphs import CudaRecorder, EagerRecorder, Recorder
from chitu.kv_cache.pool import TORCH_DTYPES
from chitu.ops.interface import Batch, HeadSpec, Ops, RotaryTable, no_callback
from chitu.ops.select import has_triton
from chitu.ops.torch_ops import TorchOps
from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import WHOLE_PROMPT_TOKENS
from chitu.tools.make_model import ModelShape

WARM_CALLS = 3
INTERPRETED_MULTIPROCESSORS = 2
"""Multiprocessor count for the choice of splits if kernels are interpreted, so that a short sequence is split too."""
COLUMNS = ("what", "measured", "unit", "ratio", "of", "aim", "met")
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes to measure. Attention alone uses `heads`, `kv_heads` and `head_dim`; everything else uses `model`."""

    model: ModelShape
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    attention_batches: tuple[int, ...]
    attention_context: int
    step_batches: tuple[int, ...]
    step_context: int
    prompts: tuple[int, ...]
    last_chunk: int
    recorded_prefills: tuple[int, ...]
    copy_bytes: int
    matmul_size: int
    transfer_pages: tuple[int, ...]
    pool_pages: int
    served_prompts: tuple[int, ...]
    served_rounds: int
    served_pages: int
    beside: tuple[int, int]
    """Rows of the decodes and of the prompt's chunk that run beside each other."""
    streams: int
    long_prompt: int
    long_prompts: int
    repeats: int


FULL = Sizes(
    # Qwen3-0.6B
    model=ModelShape(
        hidden_size=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=16384,
        tie=True,
        dtype="bfloat16",
        rope_theta=1e6,
    ),
    dtype="bfloat16",
    heads=32,
    kv_heads=8,
    head_dim=128,
    attention_batches=(32, 256),
    attention_context=4096,
    step_batches=(1, 8, 64),
    step_context=1024,
    prompts=(512, 2048, 8192),
    last_chunk=512,
    recorded_prefills=(512, 2048),
    copy_bytes=1 << 30,
    matmul_size=8192,
    transfer_pages=(256, 16),
    pool_pages=1024,
    served_prompts=(512, 2048, 8192),
    served_rounds=11,
    served_pages=6144,
    beside=(16, 2048),
    streams=16,
    long_prompt=8192,
    long_prompts=20,
    repeats=20,
)
TINY = Sizes(
    model=ModelShape(
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        vocab_size=512,
        max_position_embeddings=512,
        tie=True,
    ),
    dtype="float32",
    heads=4,
    kv_heads=2,
    head_dim=16,
    attention_batches=(2,),
    attention_context=70,
    step_batches=(2,),
    step_context=20,
    prompts=(9, 20),
    last_chunk=5,
    recorded_prefills=(16,),
    copy_bytes=1 << 20,
    matmul_size=64,
    transfer_pages=(4,),
    pool_pages=16,
    served_prompts=(40,),
    served_rounds=2,
    served_pages=128,
    beside=(2, 16),
    streams=2,
    long_prompt=200,
    long_prompts=2,
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. `of` names what `ratio` compares with; `met` tells whether the aim is met."""

    what: str
    measured: float
    unit: str
    ratio: float | None = None
    of: str = ""
    aim: str = ""
    met: bool | None = None

    def named(self, shape: str) -> Row:
        """Return the row of this shape of a model."""
        return replace(self, what=f"{shape}: {self.what}")

    def cells(self) -> tuple[object, ...]:
        ratio = "" if self.ratio is None else self.ratio
        return self.what, self.measured, self.unit, ratio, self.of, self.aim, "" if self.met is None else self.met


def at_least(what: str, measured: float, unit: str, ratio: float, of: str, aim: float | None) -> Row:
    """Return a row whose ratio should not be below its aim."""
    return Row(what, measured, unit, ratio, of, f">= {aim:g}" if aim else "", ratio >= aim if aim else None)


def at_most(what: str, measured: float, unit: str, aim: float) -> Row:
    """Return a row whose figure should not be above its aim."""
    return Row(what, measured, unit, aim=f"<= {aim:g} {unit}", met=measured <= aim)


@dataclass(slots=True)
class Ceilings:
    """Best rates of the device, from the same run; 0 until measured."""

    copy_bytes_per_s: float = 0.0
    """Read and written bytes of a plain copy."""
    flops_per_s: float = 0.0
    """Rate of a large matrix product in the model's dtype."""
    scattered_bytes_per_s: float = 0.0
    """Payload of a scattered copy within one process, counted once."""


class InterpretedOps(TorchOps):
    """Ops of the eager twin's model: interpreted attention, and matrix products by torch, since the interpreter would
    take a second for each."""

    def __init__(self, triton: TritonOps) -> None:
        super().__init__()
        self._triton = triton

    def append_attention(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
        written: Callable[[], None] = no_callback,
    ) -> torch.Tensor:
        return self._triton.append_attention(qkv_TC, heads, rotary, batch, k_PKSN, v_PKSN, written)


@dataclass(slots=True)
class Card:
    device: torch.device
    sizes: Sizes
    ceilings: Ceilings = field(default_factory=Ceilings)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "CPU, interpreted: the figures mean nothing"

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.sizes.dtype]

    def ops(self, whole_prompt_tokens: int | None = None) -> Ops:
        """Return the ops. Torch computes prompts of at least `whole_prompt_tokens`; the default is an instance's."""
        kernels = self.kernels(whole_prompt_tokens)
        return kernels if self.is_gpu else InterpretedOps(kernels)

    def kernels(self, whole_prompt_tokens: int | None = None) -> TritonOps:
        """Return the same with all products by the kernels, also where they are interpreted."""
        if self.is_gpu and not has_triton(self.device):
            raise RuntimeError("the benchmark is of the Triton kernels, and triton is not installed")
        whole = WHOLE_PROMPT_TOKENS if self.is_gpu else max(self.sizes.prompts)
        return TritonOps(self.num_multiprocessors, whole_prompt_tokens or whole)

    @property
    def num_multiprocessors(self) -> int:
        if not self.is_gpu:
            return INTERPRETED_MULTIPROCESSORS
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def stream(self, is_first: bool) -> torch.cuda.Stream | None:
        """Return a stream of the highest priority, or of the lowest; None on a CPU."""
        if not self.is_gpu:
            return None
        lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        return torch.cuda.Stream(self.device, priority=highest if is_first else lowest)  # type: ignore[no-untyped-call]

    def recorder(self) -> Recorder:
        """Return a recorder with a memory pool of its own: what two of them recorded can run at once."""
        return CudaRecorder(self.device) if self.is_gpu else EagerRecorder()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return unused memory to the device, for the processes that come next."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def seconds(self, body: Callable[[], object], repeats: int | None = None, warm: int = WARM_CALLS) -> float:
        """Return the median time of one call on the device."""
        for _ in range(warm if self.is_gpu else 0):
            body()
        self.synchronize()
        return statistics.median(self._once(body) for _ in range(repeats or self.sizes.repeats))

    def wall_seconds(self, body: Callable[[], object], repeats: int | None = None, warm: int = WARM_CALLS) -> float:
        """Return the median wall time of one call, until the device has finished it."""
        for _ in range(warm if self.is_gpu else 0):
            body()
        times = []
        for _ in range(repeats or self.sizes.repeats):
            self.synchronize()
            start_s = time.perf_counter()
            body()
            self.synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    def _once(self, body: Callable[[], object]) -> float:
        if not self.is_gpu:
            start_s = time.perf_counter()
            body()
            return time.perf_counter() - start_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        body()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
