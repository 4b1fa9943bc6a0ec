"""Window layers that keep their window beside the pages: as tensors of the request's state row, of one size whatever
the length of the sequence (`cache.window_state`). For code that must not import torch.

A token of such a layer sees the last `window` positions only, so a request needs no more of its K and V than those.
They lie in a ring: position p at place p % window. `generic/window_attention.py` reads and writes it; all else
(transfer, checksum, retraction) treats it as recurrent state, of which no part can be used alone.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from chitu.errors import ConfigError
from chitu.models.config import ModelSpec
from chitu.protocol import CacheGroup, StateTensor

KEYS, VALUES = "window_keys", "window_values"
"""Names of the two tensors `[kv_heads, window, head_dim]` of a window layer."""


def with_window_state(spec: ModelSpec, is_wanted: bool = True) -> ModelSpec:
    """Return the spec whose window layers keep K and V in the state row, and the others in pages as before. A window
    that no sequence exceeds stays in pages. Raises ConfigError if no layer is left there. Unless `is_wanted`
    (`cache.window_state`), return it as it is."""
    if not is_wanted:
        return spec
    kept = [group for group in spec.groups if not _has_ring(group, spec.max_model_len)]
    rings = [group for group in spec.groups if _has_ring(group, spec.max_model_len)]
    if not rings:
        return spec
    if not kept:
        raise ConfigError("cache.window_state: every layer of this model has a window, so no layer would have pages")
    tensors = [
        StateTensor(layer, name, "auto", (group.num_kv_heads, group.window or 0, head_dim), heads=(group.num_kv_heads,))
        for group in rings
        for layer in group.layers
        for name, head_dim in zip((KEYS, VALUES), group.head_dims, strict=True)
    ]
    state = sorted((*spec.state, *tensors), key=lambda tensor: tensor.layer)
    groups = tuple(msgspec.structs.replace(group, window=None) for group in kept)
    return replace(spec, groups=groups, state=tuple(state))


def recurrent_of(state: tuple[StateTensor, ...]) -> tuple[StateTensor, ...]:
    """Return the tensors that are no windows: those of recurrent layers."""
    return tuple(tensor for tensor in state if tensor.name not in (KEYS, VALUES))


def _has_ring(group: CacheGroup, max_model_len: int) -> bool:
    return group.window is not None and group.window < max_model_len and len(group.head_dims) == 2
