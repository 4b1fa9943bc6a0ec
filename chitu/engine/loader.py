"""From a checkpoint folder to a model on a device. Called once by the builder of the service, before sockets open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from chitu.config.devices import dtype_on
from chitu.errors import ConfigError
from chitu.kv_cache.pool import TORCH_DTYPES
from chitu.layers.decoder import DecoderModel
from chitu.layers.shard import Shard
from chitu.models.common import build_decoder
from chitu.models.config import ModelSpec, read_model_spec
from chitu.models.registry import traits_of
from chitu.models.weights import WeightSource
from chitu.ops.interface import Ops
from chitu.ops.select import select_ops


def resolve_dtype(dtype: str, spec: ModelSpec, device: torch.device) -> str:
    """Return the dtype by name. `auto` is float32 on a CPU and the checkpoint's own dtype elsewhere."""
    resolved = dtype_on(device.type, dtype, spec.dtype)
    if resolved not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype: {dtype!r} is not one of auto, {', '.join(TORCH_DTYPES)}")
    return resolved


def load_model(
    path: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    shard: Shard | None = None,
) -> DecoderModel:
    """Read the weights of a checkpoint folder, or with `shard` this rank's part of them.

    Calls `progress(bytes_done, bytes_total)` after every tensor. `max_model_len` is the length of the rotary table; see
    `read_model_spec`. Without `ops`: the fastest implementation for this device and dtype. Raises ConfigError
    (UnsupportedModel) for a folder that cannot be served, before reading weights if possible.
    """
    spec = read_model_spec(path, max_model_len)
    traits = traits_of(spec)
    target = torch.device(device)
    torch_dtype = TORCH_DTYPES[resolve_dtype(dtype, spec, target)]
    chosen = ops if ops is not None else select_ops(target, torch_dtype)
    with torch.inference_mode(), WeightSource(path, torch_dtype, target, progress) as weights:
        return build_decoder(spec, traits, weights, chosen, target, spec.max_model_len, shard)
