"""Rotary position tables. Built once per model, on load; read by every layer."""

from __future__ import annotations

import math

import torch

from chitu.errors import UnsupportedModel
from chitu.models.rope_spec import RopeSpec
from chitu.ops.interface import RotaryTable


def rotary_table(head_dim: int, rope: RopeSpec, num_positions: int, device: torch.device) -> RotaryTable:
    """Return cos and sin of every position below `num_positions`, times the attention factor."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), _inverse_frequencies(head_dim, rope))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RotaryTable(cos.to(device).contiguous(), sin.to(device).contiguous())


def _inverse_frequencies(head_dim: int, rope: RopeSpec) -> torch.Tensor:
    """Return inverse frequencies, float32 `[head_dim / 2]`. `linear` divides positions by `factor`; `llama3` only for
    long wavelengths; `yarn` with a ramp from `beta_slow` to `beta_fast` rotations within the original length.

    Uses the same float32 operations as `transformers`, so that long positions agree to the bit.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    frequency = 1.0 / powers
    if rope.type == "default":
        return frequency
    if rope.type == "linear":
        return frequency / rope.factor
    if rope.type == "llama3":
        return _llama3(frequency, rope)
    if rope.type == "yarn":
        own = 1 - _ramp(head_dim, rope)
        return 1.0 / (rope.factor * powers) * (1 - own) + frequency * own
    raise UnsupportedModel(f"rope type {rope.type!r} is not supported")


def _llama3(frequency: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    low_wavelength = rope.original_max_position_embeddings / low
    high_wavelength = rope.original_max_position_embeddings / high
    scaled = torch.where(wavelength > low_wavelength, frequency / factor, frequency)
    smooth = (rope.original_max_position_embeddings / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, scaled)


def _ramp(head_dim: int, rope: RopeSpec) -> torch.Tensor:
    """Return 0 for frequencies that stay unchanged, 1 for those that are divided by the factor."""

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this many rotations within the original length."""
        length = rope.original_max_position_embeddings
        return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
