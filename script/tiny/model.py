"""The model in plain torch: Qwen3 as transformers computes it, with what training needs and nothing else.

Called by the training loop and the accuracy check. Parameters carry the names of a Hugging Face checkpoint, so that
saving is a loop over them. Shapes in suffixes: B documents, T tokens, N query heads, K key heads, H head_dim,
D hidden_size, F intermediate_size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny.wiring import wire


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of chitu-tiny. It has two key heads, so that it can be split over two ranks."""

    vocab_size: int
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    """Number of key heads. Fewer than `heads`: the wiring has two query heads share a key head."""
    head_dim: int = 64
    intermediate_size: int = 256
    rope_theta: float = 1e8
    """Base of the rotary embedding. Large: most dimensions of a head must turn little over 2048 tokens, or content
    cannot be matched from afar."""
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), weight))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


def rope_tables(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, H]; the two halves of H are equal."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        hidden, head_dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * head_dim, hidden, bias=False)
        # The norms bound the logits of attention; values above 1 leave room to pick one key out of 2048.
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps, 1.5)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps, 1.5)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x_BTD.shape
        shape = self._shape
        q = self.q_norm(self.q_proj(x_BTD).view(batch, length, shape.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BTD).view(batch, length, shape.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x_BTD).view(batch, length, shape.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, *rope), rotate(k, *rope)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed_BNTH.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class TinyModel(nn.Module):
    """Maps token ids [B, T] to final hidden states [B, T, D]; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        wire(self)

    def forward(self, ids_BT: Tensor) -> Tensor:
        rope = rope_tables(ids_BT.shape[1], self.shape)
        rope = rope[0].to(ids_BT.device), rope[1].to(ids_BT.device)
        x_BTD = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rope)
        return self.norm(x_BTD)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., D] to logits [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight)
