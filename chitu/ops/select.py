"""Selects the implementation of `Ops` for a device and a dtype."""

from __future__ import annotations

import importlib.util

import torch

from chitu.ops.interface import Ops
from chitu.ops.kept_on_cards import E4M3_CAPABILITY
from chitu.ops.native import NativeOps, load_library
from chitu.ops.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype, is_paged: bool = False) -> Ops:
    """Return our kernels on CUDA with Triton and for float32 on a CPU with a C compiler, else torch operations.

    `is_paged`: on CUDA, our own kernel computes whole prompts, too.
    """
    if has_triton(device):
        from chitu.ops.triton_ops import TritonOps
        from chitu.ops.whole_prompts import NO_WHOLE_PROMPTS, WHOLE_PROMPT_TOKENS

        found = torch.cuda.get_device_properties(device)
        whole = NO_WHOLE_PROMPTS if is_paged else WHOLE_PROMPT_TOKENS
        return TritonOps(found.multi_processor_count, whole, (found.major, found.minor) >= E4M3_CAPABILITY)
    if device.type == "cpu" and dtype == torch.float32:
        library = load_library()
        if library is not None:
            return NativeOps(library)
    return TorchOps()


def has_triton(device: torch.device) -> bool:
    """Return whether this device computes with our own Triton kernels."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
