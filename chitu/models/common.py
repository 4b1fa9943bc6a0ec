"""Assembling a `DecoderModel` from a Hugging Face checkpoint of the Llama lineage.

The families differ in three points, which they pass in: biases on q, k and v; a bias on the output projection; norms on
the heads of q and k. Everything else, names included, they share. A tensor-parallel rank takes its part of each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of, share_of, why_not
from chitu.errors import ConfigError
from chitu.layers.decoder import AttentionLayer, DecoderLayer, DecoderModel, GatedMLP, MixtureMLP
from chitu.layers.rotary import inverse_frequencies, rotary_table
from chitu.layers.shard import Shard
from chitu.models.config import ModelSpec
from chitu.models.experts import build_mixture
from chitu.models.weights import Rows, WeightSource
from chitu.ops.interface import HeadSpec, Ops


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets a family apart."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one of `size` ranks has of a model: rows of q, of k and v, of the MLP and of the vocabulary."""

    rank: int
    size: int
    query: range
    key: range
    inner: range
    vocabulary: tuple[range, ...]
    """Of every rank."""

    @property
    def is_main(self) -> bool:
        return self.rank == MAIN_RANK


def part_of(spec: ModelSpec, rank: int, size: int) -> Part:
    """ConfigError where the model cannot be cut for so many ranks."""
    reason = why_not(spec.num_heads, spec.num_kv_heads, size)
    if not reason and min(spec.intermediate_size, spec.vocab_size) < size:
        reason = f"{min(spec.intermediate_size, spec.vocab_size)} rows cannot be split over {size} ranks"
    if reason:
        raise ConfigError(f"tp_size {size}: {reason}")

    def rows(heads: range) -> range:
        return range(heads.start * spec.head_dim, heads.stop * spec.head_dim)

    return Part(
        rank=rank,
        size=size,
        query=rows(share_of(spec.num_heads, size, rank)),
        key=rows(kv_heads_of(spec.num_kv_heads, size, rank)),
        inner=share_of(spec.intermediate_size, size, rank),
        vocabulary=tuple(share_of(spec.vocab_size, size, each) for each in range(size)),
    )


def build_decoder(
    spec: ModelSpec,
    traits: Traits,
    weights: WeightSource,
    ops: Ops,
    device: torch.device,
    num_positions: int,
    shard: Shard | None = None,
) -> DecoderModel:
    """Take every tensor of the checkpoint, or this rank's part of it. `num_positions`: length of the rotary table."""
    part = part_of(spec, shard.rank, shard.size) if shard is not None else part_of(spec, 0, 1)
    layers = [_layer(spec, traits, weights, ops, part, index) for index in range(spec.num_layers)]
    own = part.vocabulary[part.rank]
    embedding_VD = weights.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, rows=own)
    if spec.tie_word_embeddings:
        weights.ignore("lm_head.weight")
        head_VD = embedding_VD
    else:
        head_VD = weights.take("lm_head.weight", spec.vocab_size, spec.hidden_size, rows=own)
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
        shard=shard,
        vocabulary=part.vocabulary,
    )


def _layer(spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, part: Part, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp, hidden = f"{prefix}.self_attn", f"{prefix}.mlp", spec.hidden_size
    q_rows, kv_rows, inner = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.intermediate_size,
    )
    q_norm_N = weights.take(f"{attention}.q_norm.weight", spec.head_dim) if traits.qk_norm else None
    k_norm_N = weights.take(f"{attention}.k_norm.weight", spec.head_dim) if traits.qk_norm else None

    def by_output(module: str, cuts: list[Rows], bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        def stacked(kind: str, *rest: int) -> torch.Tensor:
            return weights.take_rows([cut._replace(name=f"{module}.{cut.name}.{kind}") for cut in cuts], *rest)

        return stacked("weight", hidden), stacked("bias") if bias else None

    def by_input(name: str, total: int, columns: range, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = weights.take(f"{name}.weight", hidden, total, columns=columns)
        bias_D = weights.take(f"{name}.bias", hidden) if bias else None
        return weight, bias_D if part.is_main else None  # added once, not once per rank

    qkv = [Rows("q_proj", q_rows, part.query), Rows("k_proj", kv_rows, part.key), Rows("v_proj", kv_rows, part.key)]
    gate_up = [Rows("gate_proj", inner, part.inner), Rows("up_proj", inner, part.inner)]
    heads = HeadSpec(
        len(part.query) // spec.head_dim,
        len(part.key) // spec.head_dim,
        spec.head_dim,
        spec.rms_norm_eps,
        q_norm_N,
        k_norm_N,
    )
    mlp_layer: GatedMLP | MixtureMLP
    if spec.experts is not None and index in spec.experts.layers:
        mlp_layer = build_mixture(spec, spec.experts, weights, ops, mlp, part.rank, part.size)
    else:
        mlp_layer = GatedMLP(
            gate_up=ops.prepare_gate_up(*by_output(mlp, gate_up, spec.mlp_bias)),
            down=ops.prepare(*by_input(f"{mlp}.down_proj", inner, part.inner, spec.mlp_bias)),
        )
    return DecoderLayer(
        input_norm_D=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        attention=AttentionLayer(
            heads=heads,
            qkv=ops.prepare(*by_output(attention, qkv, traits.qkv_bias)),
            output=ops.prepare(*by_input(f"{attention}.o_proj", q_rows, part.query, traits.output_bias)),
        ),
        post_attention_norm_D=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=mlp_layer,
    )
