"""Rotary position tables. Built once per model, on load; read by every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from chitu.errors import UnsupportedModel
from chitu.ops.interface import RotaryTable


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of frequencies for positions beyond those of the training; see `models.rope_spec.RopeSpec`."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> torch.Tensor:
    """Return inverse frequencies, float32 `[head_dim / 2]`. `linear` divides positions by `factor`; `llama3` only for
    long wavelengths; `yarn` with a ramp from `beta_slow` to `beta_fast` rotations within the original length.

    Uses the same float32 operations as `transformers`, so that long positions agree to the bit.
    """
    scaling = scaling or Scaling()
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    frequency = 1.0 / powers
    if scaling.kind == "default":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequency, scaling)
    if scaling.kind == "yarn":
        own = 1 - _ramp(head_dim, theta, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - own) + frequency * own
    raise UnsupportedModel(f"rope type {scaling.kind!r} is not supported")


def _llama3(frequency: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequency
    low_wavelength = scaling.original_max_position_embeddings / low
    high_wavelength = scaling.original_max_position_embeddings / high
    scaled = torch.where(wavelength > low_wavelength, frequency / factor, frequency)
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, scaled)


def _ramp(head_dim: int, theta: float, scaling: Scaling) -> torch.Tensor:
    """Return 0 for frequencies that stay unchanged, 1 for those that are divided by the factor."""

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this many rotations within the original length."""
        length = scaling.original_max_position_embeddings
        return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)


def rotary_table(
    inverse_frequency: torch.Tensor, num_positions: int, device: torch.device, amplitude: float = 1.0
) -> RotaryTable:
    """Return cos and sin of every position below `num_positions`, times `amplitude`."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequency)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return RotaryTable(cos.to(device).contiguous(), sin.to(device).contiguous())
