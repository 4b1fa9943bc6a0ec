"""Picks the implementation of `Ops` for a device and a dtype."""

from __future__ import annotations

import importlib.util

import torch

from chitu.ops.interface import Ops
from chitu.ops.native import NativeOps, load_library
from chitu.ops.torch_ops import TorchOps


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Own kernels for float32 on a CPU with a C compiler and on CUDA with Triton, torch operations everywhere else."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from chitu.ops.triton_ops import TritonOps

        return TritonOps(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "cpu" and dtype == torch.float32:
        library = load_library()
        if library is not None:
            return NativeOps(library)
    return TorchOps()
