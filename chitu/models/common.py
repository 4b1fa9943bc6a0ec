"""Assembling a `DecoderModel` from a Hugging Face checkpoint of the Llama lineage.

The families differ in three points, which they pass in: biases on q, k and v; a bias on the output projection; norms on
the heads of q and k. Everything else, names included, they share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chitu.layers.decoder import AttentionLayer, DecoderLayer, DecoderModel, GatedMLP
from chitu.layers.rotary import inverse_frequencies, rotary_table
from chitu.models.config import ModelSpec
from chitu.models.weights import WeightSource
from chitu.ops.interface import HeadSpec, Ops

StackedWeight = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets a family apart."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


def build_decoder(
    spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, device: torch.device, num_positions: int
) -> DecoderModel:
    """Take every tensor of the checkpoint. `num_positions`: length of the rotary table."""
    layers = [_layer(spec, traits, weights, ops, f"model.layers.{index}") for index in range(spec.num_layers)]
    embedding_VD = weights.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    if spec.tie_word_embeddings:
        weights.ignore("lm_head.weight")
        head_VD = embedding_VD
    else:
        head_VD = weights.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    final_norm_D = weights.take("model.norm.weight", spec.hidden_size)
    weights.ignore("rotary_emb.inv_freq")
    weights.finish()
    rope = spec.rope
    frequencies = inverse_frequencies(
        spec.head_dim,
        rope.theta,
        rope.type,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )
    return DecoderModel(
        ops=ops,
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=final_norm_D,
        head=ops.prepare(head_VD, None),
        rotary=rotary_table(frequencies, num_positions, device),
        eps=spec.rms_norm_eps,
    )


def _layer(spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, prefix: str) -> DecoderLayer:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    q_norm_N = weights.take(f"{attention}.q_norm.weight", spec.head_dim) if traits.qk_norm else None
    k_norm_N = weights.take(f"{attention}.k_norm.weight", spec.head_dim) if traits.qk_norm else None

    def stack(module: str, parts: list[tuple[str, int]], in_features: int, bias: bool) -> StackedWeight:
        weight = weights.take_rows([(f"{module}.{name}.weight", rows) for name, rows in parts], in_features)
        return weight, weights.take_rows([(f"{module}.{name}.bias", rows) for name, rows in parts]) if bias else None

    qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
    output, down = [("o_proj", spec.hidden_size)], [("down_proj", spec.hidden_size)]
    gate_up = [("gate_proj", spec.intermediate_size), ("up_proj", spec.intermediate_size)]
    return DecoderLayer(
        input_norm_D=weights.take(f"{prefix}.input_layernorm.weight", spec.hidden_size),
        attention=AttentionLayer(
            heads=HeadSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, q_norm_N, k_norm_N),
            qkv=ops.prepare(*stack(attention, qkv, spec.hidden_size, traits.qkv_bias)),
            output=ops.prepare(*stack(attention, output, q_rows, traits.output_bias)),
        ),
        post_attention_norm_D=weights.take(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
        mlp=GatedMLP(
            gate_up=ops.prepare_gate_up(*stack(mlp, gate_up, spec.hidden_size, spec.mlp_bias)),
            down=ops.prepare(*stack(mlp, down, spec.intermediate_size, spec.mlp_bias)),
        ),
    )
