"""Helpers of these tests that are not fixtures."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of `expected`, in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
