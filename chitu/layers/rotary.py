"""Rotary position tables. Built once per model, on load; read by every layer."""

from __future__ import annotations

import math

import torch

from chitu.errors import UnsupportedModel
from chitu.ops.interface import RotaryTable


def inverse_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position_embeddings: int = 8192,
) -> torch.Tensor:
    """float32 `[head_dim / 2]`. `linear` divides positions by `factor`; `llama3` does so for long wavelengths only.

    Computed with the same float32 operations as `transformers`, so that long positions agree to the bit.
    """
    frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim))
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / factor
    if kind != "llama3":
        raise UnsupportedModel(f"rope type {kind!r} is not supported")
    wavelength = 2 * math.pi / frequency
    low_wavelength = original_max_position_embeddings / low_freq_factor
    high_wavelength = original_max_position_embeddings / high_freq_factor
    scaled = torch.where(wavelength > low_wavelength, frequency / factor, frequency)
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, scaled)


def rotary_table(inverse_frequency: torch.Tensor, num_positions: int, device: torch.device) -> RotaryTable:
    """cos and sin of every position below `num_positions`."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequency)
    return RotaryTable(angles.cos().to(device).contiguous(), angles.sin().to(device).contiguous())
