"""Multi-head latent attention with absorbed weights (DeepSeek-V2, section 2.1), for prefill and decode alike.

A token has one row in the cache: a normed latent, from which keys and values of all heads are linear maps, and one
rotated key. So a head's query is mapped into the latent space (the key weight is applied to the query instead of to
every key) and attends to the cache as if all heads shared one KV head; the value weight is applied to the result. The
cache is never expanded. Called by `DecoderModel`; holds no state of any request.

Shapes: H heads, Q rank of q, L of the latent, R rotated part, C = L + R a row of the cache, E = N + R a head of q,
N its part that is not rotated, O a head of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chitu.ops.interface import Batch, LatentHeads, LinearWeight, Ops, RotaryTable

INNER_NORM_EPS = 1e-6
"""Epsilon of the norms on q and on the latent, whatever epsilon the config has for the other norms."""


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    heads: LatentHeads
    down: LinearWeight
    """Projections of the hidden state: `[Q + C, D]`, or `[H E + C, D]` without a rank of q."""
    query_norm_Q: torch.Tensor | None
    query: LinearWeight | None
    """Projection `[H E, Q]` of q; None if `down` has it."""
    key_HNL: torch.Tensor
    """Projection from latent to key, transposed, to apply to q."""
    value_HLO: torch.Tensor
    output: LinearWeight
    """Projection `[D, H O]`."""

    def mix(
        self,
        ops: Ops,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        rotary: RotaryTable,
        batch: Batch,
        pages_PKSC: torch.Tensor,
        on_written: Callable[[], None],
    ) -> torch.Tensor:
        """Return `[T, H O]`, the input of `output`. Calls `on_written` when the rows are in the cache."""
        heads = self.heads
        down_TF = ops.norm_linear(x_TD, norm_D, eps, self.down)
        rest = down_TF.shape[1] - heads.latent_dim - heads.rope_dim
        q_TF, kv_TC = down_TF.split_with_sizes((rest, heads.latent_dim + heads.rope_dim), dim=1)
        # Before q is computed, since the operations may reuse the memory of `down_TF`.
        ops.latent_append(kv_TC, heads, rotary, batch, pages_PKSC)
        on_written()
        if self.query is not None and self.query_norm_Q is not None:
            q_TF = ops.norm_linear(q_TF.contiguous(), self.query_norm_Q, INNER_NORM_EPS, self.query)
        q_THC = ops.latent_query(q_TF.view(q_TF.shape[0], heads.num_heads, -1), self.key_HNL, heads, rotary, batch)
        mixed_THL = ops.latent_attention(q_THC, heads, batch, pages_PKSC)
        values_HTO = torch.bmm(mixed_THL.transpose(0, 1), self.value_HLO)
        return values_HTO.transpose(0, 1).flatten(1)
