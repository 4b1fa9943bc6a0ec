"""DeepSeek-V2 and -V3: latent attention, a mixture of experts with shared ones behind the first layers."""

from __future__ import annotations

from chitu.models.common import Traits
from chitu.models.config import ModelSpec


def traits(spec: ModelSpec) -> Traits:
    """Nothing of what sets the others apart: the spec says it all."""
    return Traits()
