"""Chooses the operations of a rank that computes prompts, by `model.prefill_attention` and its part of the model, and
the prompts that must warm them up before the first request.

Called once by the main thread of a rank (`engine/build.py`), before weights are read.
"""

from __future__ import annotations

import torch

from chitu.config.schema import Topology
from chitu.config.topology import Instance
from chitu.errors import ConfigError
from chitu.kv_cache.pool import TORCH_DTYPES
from chitu.models.config import ModelSpec
from chitu.ops.flashinfer_library import PrefillShape
from chitu.ops.fp8_pages import E4M3
from chitu.ops.interface import Ops
from chitu.ops.select import select_prefill_ops
from chitu.types import Role


def prefill_ops(
    topology: Topology, instance: Instance, spec: ModelSpec, device: torch.device, model_dtype: str, kv_dtype: str
) -> Ops | None:
    """Return the operations, with FlashInfer built and tried if it is wanted, which may take minutes. Return None if
    `select_ops` decides: on D, with latent attention, on a CPU. Raises ConfigError if FlashInfer is required but fails.

    `model_dtype`, `kv_dtype`: names of the dtypes of the model and of its pages.
    """
    wanted, tp_size = topology.model.prefill_attention, instance.config.tp_size
    if instance.role is Role.DECODE:
        return None
    if spec.regions_per_layer == 1:
        if wanted == "flashinfer":
            raise ConfigError("model.prefill_attention is flashinfer, but latent attention uses its own kernel only")
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
    """Return prompt lengths for the warm-up of a GPU, a tuple for each step: every length that prompts are padded to
    for torch's library, else one too long for a recording. `longest_recorded`: tokens of a step; 0 without recordings.
    """
    if device.type != "cuda" or instance.role is Role.DECODE:
        return []
    from chitu.ops.whole_prompts import WHOLE_PROMPT_TOKENS, padded_lengths  # Triton: only with a GPU

    scheduler = topology.scheduler
    longest = min(scheduler.chunk_size, scheduler.max_batched_tokens, spec.max_model_len)
    lengths = [longest_recorded + 1]
    if topology.model.prefill_attention == "auto" and spec.regions_per_layer != 1:
        lengths = [min(length, longest) for length in padded_lengths(WHOLE_PROMPT_TOKENS, longest)]
    # A prompt short enough for a recording reaches the library together with others, in a step too long to be recorded.
    steps = [(n,) if n > longest_recorded else (n, longest_recorded + 1 - n) for n in lengths]
    return [step for step in steps if sum(step) <= scheduler.max_batched_tokens and max(step) <= longest]
