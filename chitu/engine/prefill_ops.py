"""Which operations a rank that computes prompts gets: `model.prefill_attention` applied to its part of the model; and
which prompts those must have seen before the first request.

Called once by the main thread of a rank (`engine/build.py`), before weights are read.
"""

from __future__ import annotations

import torch

from chitu.config.schema import Topology
from chitu.config.topology import Instance
from chitu.engine.loader import TORCH_DTYPES
from chitu.errors import ConfigError
from chitu.models.config import ModelSpec
from chitu.ops.flashinfer_library import PrefillShape
from chitu.ops.fp8_pages import E4M3
from chitu.ops.interface import Ops
from chitu.ops.select import select_prefill_ops
from chitu.types import Role


def prefill_ops(
    topology: Topology, instance: Instance, spec: ModelSpec, device: torch.device, model_dtype: str, kv_dtype: str
) -> Ops | None:
    """With FlashInfer built and tried, where it is wanted; that may take minutes. None where `select_ops` has the
    answer: on D, with latent attention, on a CPU. ConfigError where it is asked for and cannot be had.

    `model_dtype`, `kv_dtype`: by name, of the model and of its pages.
    """
    wanted, tp_size = topology.model.prefill_attention, instance.config.tp_size
    if instance.role is Role.DECODE:
        return None
    if spec.regions_per_layer == 1:
        if wanted == "flashinfer":
            raise ConfigError("model.prefill_attention is flashinfer, but latent attention has its own kernel alone")
        return None
    if device.type != "cuda" and wanted != "flashinfer":
        return None
    shape = PrefillShape(
        num_heads=spec.num_heads // tp_size,
        num_kv_heads=max(1, spec.num_kv_heads // tp_size),
        head_dim=spec.head_dim,
        page_size=topology.cache.page_size,
        dtype=TORCH_DTYPES[model_dtype],
        kv_dtype=TORCH_DTYPES.get(kv_dtype, E4M3),
    )
    return select_prefill_ops(device, shape, wanted)


def warmup_prompts(
    topology: Topology, instance: Instance, spec: ModelSpec, device: torch.device, longest_recorded: int
) -> list[tuple[int, ...]]:
    """Prompts for the warm-up of a GPU, those of one step together: every length that prompts are padded to for torch's
    library, or else one that is too long for a recording. `longest_recorded`: tokens of a step; 0 without recordings.
    """
    if device.type != "cuda" or instance.role is Role.DECODE:
        return []
    from chitu.ops.whole_prompts import WHOLE_PROMPT_TOKENS, padded_lengths  # Triton: only where there is a GPU

    scheduler = topology.scheduler
    longest = min(scheduler.chunk_size, scheduler.max_batched_tokens, spec.max_model_len)
    lengths = [longest_recorded + 1]
    if topology.model.prefill_attention == "auto" and spec.regions_per_layer != 1:
        lengths = [min(length, longest) for length in padded_lengths(WHOLE_PROMPT_TOKENS, longest)]
    # A prompt that a recording holds meets the library beside others, when the step is too long to be recorded.
    steps = [(n,) if n > longest_recorded else (n, longest_recorded + 1 - n) for n in lengths]
    return [step for step in steps if sum(step) <= scheduler.max_batched_tokens and max(step) <= longest]
