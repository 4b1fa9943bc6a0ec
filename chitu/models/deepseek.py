"""DeepSeek-V2 and -V3: latent attention, and a mixture of experts with shared experts behind the first layers."""

from __future__ import annotations

from chitu.models.config import ModelSpec
from chitu.models.traits import Traits


def traits(spec: ModelSpec) -> Traits:
    """Return default traits: the spec describes the model completely."""
    return Traits()
