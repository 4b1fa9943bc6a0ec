"""Builds a `DecoderModel` from a Hugging Face checkpoint of the Llama lineage.

The families differ in three points (`Traits`): biases on q, k and v; a bias on the output projection; norms on the
heads of q and k. They share everything else, tensor names included. A tensor-parallel rank takes its part of each
matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of, share_of, why_not
from chitu.errors import ConfigError, UnsupportedModel
from chitu.layers.decoder import AttentionLayer, DecoderLayer, DecoderModel, GatedMLP
from chitu.layers.shard import Shard
from chitu.models.config import ModelSpec
from chitu.models.experts import build_mixture
from chitu.models.latent import build_latent
from chitu.models.rotary import rotary_table
from chitu.models.tensor_names import UNUSED_SUFFIX
from chitu.models.traits import Traits
from chitu.models.weights import Rows, WeightSource
from chitu.ops.interface import HeadSpec, LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a model on one of `size` ranks: rows of q, of k and v, of the MLP and of the vocabulary."""

    rank: int
    size: int
    query: range
    key: range
    inner: range
    vocabulary: tuple[range, ...]
    """Vocabulary rows of every rank."""

    @property
    def is_main(self) -> bool:
        return self.rank == MAIN_RANK


def part_of(spec: ModelSpec, rank: int, size: int) -> Part:
    """Return the part of one rank. Raises ConfigError if the model cannot be split over this many ranks."""
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
    """Build the model from the checkpoint's tensors, or from this rank's part. `num_positions`: of the rotary table."""
    part = part_of(spec, shard.rank, shard.size) if shard is not None else part_of(spec, 0, 1)
    layers = [_layer(spec, traits, weights, ops, part, index) for index in range(spec.num_layers)]
    own = part.vocabulary[part.rank]
    embedding_VD = weights.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, rows=own)
    if spec.tie_word_embeddings:
        head_VD = embedding_VD
        if weights.has("lm_head.weight") and not torch.equal(_head(spec, weights, own), embedding_VD):
            raise UnsupportedModel(
                "tie_word_embeddings is true, but the checkpoint has an lm_head.weight of its own: "
                "versions of transformers do not agree on which counts; make it false if the head is right"
            )
    else:
        head_VD = _head(spec, weights, own)
    final_norm_D = weights.take("model.norm.weight", spec.hidden_size)
    weights.ignore(UNUSED_SUFFIX)
    if spec.num_extra_layers:  # for multi-token prediction; the model is complete without them
        weights.ignore_layers(range(spec.num_layers, spec.num_layers + spec.num_extra_layers))
    weights.finish()
    rotated = spec.head_dim if spec.latent is None else spec.latent.rope_dim
    return DecoderModel(
        ops=ops,
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=final_norm_D,
        head=ops.prepare(head_VD, None),
        rotary=rotary_table(rotated, spec.rope, num_positions, device),
        eps=spec.rms_norm_eps,
        shard=shard,
        vocabulary=part.vocabulary,
    )


def _head(spec: ModelSpec, weights: WeightSource, rows: range) -> torch.Tensor:
    return weights.take("lm_head.weight", spec.vocab_size, spec.hidden_size, rows=rows)


def _layer(spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, part: Part, index: int) -> DecoderLayer:
    prefix, hidden = f"model.layers.{index}", spec.hidden_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return DecoderLayer(
        input_norm_D=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        attention=(
            _attention(spec, traits, weights, ops, part, attention)
            if spec.latent is None
            else build_latent(spec, spec.latent, weights, ops, attention, part.rank, part.size)
        ),
        post_attention_norm_D=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=(
            build_mixture(spec, spec.experts, weights, ops, mlp, part.rank, part.size)
            if spec.experts is not None and index in spec.experts.layers
            else _mlp(spec, weights, ops, part, mlp)
        ),
    )


def _attention(
    spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, part: Part, prefix: str
) -> AttentionLayer:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    cuts = [Rows("q_proj", q_rows, part.query), Rows("k_proj", kv_rows, part.key), Rows("v_proj", kv_rows, part.key)]
    heads = HeadSpec(
        len(part.query) // spec.head_dim,
        len(part.key) // spec.head_dim,
        spec.head_dim,
        spec.rms_norm_eps,
        weights.take(f"{prefix}.q_norm.weight", spec.head_dim) if traits.qk_norm else None,
        weights.take(f"{prefix}.k_norm.weight", spec.head_dim) if traits.qk_norm else None,
    )
    return AttentionLayer(
        heads=heads,
        qkv=ops.prepare(*_by_output(weights, prefix, cuts, spec.hidden_size, traits.qkv_bias)),
        output=_by_input(spec, weights, ops, part, f"{prefix}.o_proj", q_rows, part.query, traits.output_bias),
    )


def _mlp(spec: ModelSpec, weights: WeightSource, ops: Ops, part: Part, prefix: str) -> GatedMLP:
    inner, has_bias = spec.intermediate_size, spec.mlp_bias
    cuts = [Rows("gate_proj", inner, part.inner), Rows("up_proj", inner, part.inner)]
    return GatedMLP(
        gate_up=ops.prepare_gate_up(*_by_output(weights, prefix, cuts, spec.hidden_size, has_bias)),
        down=_by_input(spec, weights, ops, part, f"{prefix}.down_proj", inner, part.inner, has_bias),
    )


def _by_output(
    weights: WeightSource, module: str, cuts: list[Rows], inputs: int, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return these rows of several matrices as one matrix, and their biases as one vector."""

    def stacked(kind: str, *rest: int) -> torch.Tensor:
        return weights.take_rows([cut._replace(name=f"{module}.{cut.name}.{kind}") for cut in cuts], *rest)

    return stacked("weight", inputs), stacked("bias") if has_bias else None


def _by_input(
    spec: ModelSpec,
    weights: WeightSource,
    ops: Ops,
    part: Part,
    name: str,
    total: int,
    columns: range,
    has_bias: bool,
) -> LinearWeight:
    """Return `columns` out of `total` of the matrix that projects back to the hidden state."""
    weight = weights.take(f"{name}.weight", spec.hidden_size, total, columns=columns)
    bias_D = weights.take(f"{name}.bias", spec.hidden_size) if has_bias else None
    return ops.prepare(weight, bias_D if part.is_main else None)  # added once, not once per rank
