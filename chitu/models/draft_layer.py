"""The layer of a checkpoint that drafts (multi-token prediction, as DeepSeek-V3 published it), if the cluster uses it
(`scheduler.speculation: mtp`). For code that must not import torch.

It stands behind the last layer of the model and has K and V of its own, one more cache group: whatever moves, keeps or
sums pages takes it as any other layer. Its entry at position p is computed of token p and of the hidden state, behind
the final norm, of position p - 1. So an entry depends on tokens up to its own alone, as those of other layers do, and
position 0 has none.
"""

from __future__ import annotations

from dataclasses import replace

from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.config import ModelSpec
from chitu.protocol import CacheGroup

KEY = "scheduler.speculation is mtp"


def with_draft_layer(spec: ModelSpec, is_wanted: bool = True) -> ModelSpec:
    """Return the spec with the first of the layers that the checkpoint has for drafts; unless `is_wanted`, as it is.
    Raises ConfigError for a model without one, UnsupportedModel for one whose layer is not computed here."""
    if not is_wanted:
        return spec
    if spec.code != "own" or spec.latent is None:
        raise UnsupportedModel(f"{KEY}, and this model ({spec.architecture}) is not one whose drafts are computed here")
    if not spec.num_extra_layers:
        raise ConfigError(f"{KEY}, but the model has no layer for it (num_nextn_predict_layers in config.json is 0)")
    if spec.latent.index is not None:
        raise UnsupportedModel(f"{KEY}, which is not supported with sparse attention ({spec.architecture})")
    layer, experts = spec.num_layers, spec.experts
    group = CacheGroup((layer,), spec.num_kv_heads, (spec.head_dim,))
    if experts is not None:  # its MLP always has them
        experts = replace(experts, layers=experts.layers | {layer})
    return replace(spec, groups=(*spec.groups, group), experts=experts, has_draft_layer=True)
