"""Multi-head latent attention with absorbed weights (DeepSeek-V2, section 2.1), for prefill and decode alike.

A token leaves one row in the cache: a normed latent, which keys and values of all heads are linear in, and one rotated
key. So a head's query is brought into the latent's space (its key weight applied to the query instead of to every key)
and attends to the cache as if all heads shared one KV head; the value weight is applied to the result. Nothing of the
cache is ever expanded. Called by `DecoderModel`; holds no state of any request.

Shapes: H heads, Q rank of q, L of the latent, R rotated part, C = L + R a row of the cache, E = N + R a head of q,
N its part that is not rotated, O a head of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chitu.ops.interface import Batch, LatentHeads, LinearWeight, Ops, RotaryTable

INNER_NORM_EPS = 1e-6
"""Of the norms on q and on the latent, whatever the config says of the others."""


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    heads: LatentHeads
    down: LinearWeight
    """`[Q + C, D]`, or without a rank of q `[H E + C, D]`: what comes of the hidden state directly."""
    query_norm_Q: torch.Tensor | None
    query: LinearWeight | None
    """`[H E, Q]`; None: q is in `down`."""
    key_HNL: torch.Tensor
    """From latent to key, transposed: what is applied to q."""
    value_HLO: torch.Tensor
    output: LinearWeight
    """`[D, H O]`."""

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
        """`[T, H O]`, what `output` is to be applied to. `on_written` is called when the rows are in the cache."""
        heads = self.heads
        down_TF = ops.norm_linear(x_TD, norm_D, eps, self.down)
        rest = down_TF.shape[1] - heads.latent_dim - heads.rope_dim
        q_TF, kv_TC = down_TF.split_with_sizes((rest, heads.latent_dim + heads.rope_dim), dim=1)
        # Before q is computed: the operations may use the memory of `down_TF` again.
        ops.latent_append(kv_TC, heads, rotary, batch, pages_PKSC)
        on_written()
        if self.query is not None and self.query_norm_Q is not None:
            q_TF = ops.norm_linear(q_TF.contiguous(), self.query_norm_Q, INNER_NORM_EPS, self.query)
        q_THC = ops.latent_query(q_TF.view(q_TF.shape[0], heads.num_heads, -1), self.key_HNL, heads, rotary, batch)
        mixed_THL = ops.latent_attention(q_THC, heads, batch, pages_PKSC)
        values_HTO = torch.bmm(mixed_THL.transpose(0, 1), self.value_HLO)
        return values_HTO.transpose(0, 1).flatten(1)
