"""Which operations a rank that computes prompts gets: `model.prefill_attention` applied to its part of the model.

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
