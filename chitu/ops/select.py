"""Selects the implementation of `Ops` for a device and a dtype."""

from __future__ import annotations

import importlib.util

import torch

from chitu.errors import ConfigError
from chitu.ops.flashinfer_prefill import PrefillShape, open_flashinfer
from chitu.ops.interface import Ops
from chitu.ops.native import NativeOps, load_library
from chitu.ops.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return our kernels on CUDA with Triton and for float32 on a CPU with a C compiler, else torch operations."""
    if has_triton(device):
        from chitu.ops.triton_ops import TritonOps

        return TritonOps(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "cpu" and dtype == torch.float32:
        library = load_library()
        if library is not None:
            return NativeOps(library)
    return TorchOps()


def has_triton(device: torch.device) -> bool:
    """Return whether this device computes with our own Triton kernels."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def select_prefill_ops(device: torch.device, shape: PrefillShape, prefill_attention: str) -> Ops:
    """Return the operations of a rank that prefills: with FlashInfer if `model.prefill_attention` and the device allow
    it. Raises ConfigError if FlashInfer is required but cannot be used. May compile for minutes."""
    if not has_triton(device):
        if prefill_attention == "flashinfer":
            raise ConfigError(
                f"model.prefill_attention is flashinfer, but {device} does not compute with Triton kernels"
            )
        return select_ops(device, shape.dtype)
    from chitu.ops.triton_ops import TritonOps
    from chitu.ops.whole_prompts import NO_WHOLE_PROMPTS, WHOLE_PROMPT_TOKENS

    return TritonOps(
        torch.cuda.get_device_properties(device).multi_processor_count,
        WHOLE_PROMPT_TOKENS if prefill_attention == "auto" else NO_WHOLE_PROMPTS,
        open_flashinfer(prefill_attention, shape, device),
    )
