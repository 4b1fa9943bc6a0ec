"""Helpers of these tests that are no fixtures."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`, in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
