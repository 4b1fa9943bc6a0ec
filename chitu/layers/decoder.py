"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: embedding, layers of attention and gated MLP, norm, head.

A family (`chitu/models/*.py`) says which tensors of its checkpoint go where; this says how they are computed. q, k and
v are one weight, so are gate and up: one large product instead of several. Holds no state of any request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chitu.ops.interface import Batch, HeadSpec, LinearWeight, Ops, RotaryTable


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    heads: HeadSpec
    qkv: LinearWeight
    """`[(H + 2 K) N, D]`."""
    output: LinearWeight
    """`[D, H N]`."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: LinearWeight
    """`[2 I, D]`, gate rows first."""
    down: LinearWeight
    """`[D, I]`."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm_D: torch.Tensor
    attention: AttentionLayer
    post_attention_norm_D: torch.Tensor
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights and constants of a loaded model."""

    ops: Ops
    embedding_VD: torch.Tensor
    layers: Sequence[DecoderLayer]
    final_norm_D: torch.Tensor
    head: LinearWeight
    rotary: RotaryTable
    eps: float

    def forward(
        self,
        token_ids_T: torch.Tensor,
        batch: Batch,
        k_pages: Sequence[torch.Tensor],
        v_pages: Sequence[torch.Tensor],
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states `[T, D]` before the final norm; K and V of all rows are written into the pages.

        `on_layer(l)` is called as soon as K and V of layer l are in the pages, before its attention is computed.
        """
        ops = self.ops
        x_TD = self.embedding_VD[token_ids_T]
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            normed_TD = ops.rms_norm(x_TD, layer.input_norm_D, self.eps)
            qkv_TC = ops.linear(normed_TD, attention.qkv)
            k_PKSN, v_PKSN = k_pages[index], v_pages[index]
            q_THN = ops.rope_append(qkv_TC, attention.heads, self.rotary, batch, k_PKSN, v_PKSN)
            if on_layer is not None:
                on_layer(index)
            mixed_TC = ops.attention(q_THN, attention.heads, batch, k_PKSN, v_PKSN)
            x_TD = ops.linear_add(mixed_TC, attention.output, x_TD)
            normed_TD = ops.rms_norm(x_TD, layer.post_attention_norm_D, self.eps)
            x_TD = ops.linear_add(ops.gate_up(normed_TD, layer.mlp.gate_up), layer.mlp.down, x_TD)
        return x_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """float32 logits `[R, V]` of the chosen rows of `forward`'s result."""
        return self.ops.linear(self.ops.rms_norm(hidden_RD, self.final_norm_D, self.eps), self.head).float()
