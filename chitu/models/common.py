"""Builds a `DecoderModel` from a Hugging Face checkpoint of the Llama lineage, and the parts that only some families
have: a mixture of experts, latent attention. Called once by the builder of the engine.

The families differ in four points (`Traits`): biases on q, k and v; a bias on the output projection; norms on the
heads of q and k; sinks of the heads. They share everything else, tensor names included, but that experts may be joined
(`joined_experts.py`). Tables of rotary positions are built once per model.

A tensor-parallel rank takes its part of each matrix, of every expert's inner dimension as of a dense MLP's, and the
whole router of experts. Of experts that are spread it takes its own, whole. With latent attention it has its heads;
every rank computes the latent itself, since the cache of every rank holds it. The projection from the latent is
absorbed here: split, per head, into a part that multiplies q and a part that multiplies the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from chitu.config.tensor_parallel import MAIN_RANK, kv_heads_of, share_of, why_not
from chitu.errors import ConfigError, UnsupportedModel
from chitu.models.checkpoint import EMBEDDING, HEAD, UNUSED_SUFFIX
from chitu.models.config import ModelSpec
from chitu.models.config_parts import ExpertSpec, IndexSpec, LatentSpec, RopeSpec
from chitu.models.draft_layer import KEY
from chitu.models.families import Traits
from chitu.models.joined_experts import build_joined
from chitu.models.layers import (
    INNER_NORM_EPS,
    AttentionLayer,
    DecoderLayer,
    DecoderModel,
    DraftLayer,
    GatedMLP,
    LatentAttentionLayer,
    MixtureMLP,
    Shard,
    SparseIndex,
    Spread,
)
from chitu.models.weights import Rows, WeightSource
from chitu.ops.interface import HeadSpec, LatentHeads, LinearWeight, Ops, RotaryTable
from chitu.ops.kept import KeptBlocks, Matrix, Weights, dequantised
from chitu.ops.routing import Router


def rotary_table(head_dim: int, rope: RopeSpec, num_positions: int, device: torch.device) -> RotaryTable:
    """Return cos and sin of every position below `num_positions`, times the attention factor."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), _inverse_frequencies(head_dim, rope))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RotaryTable(cos.to(device).contiguous(), sin.to(device).contiguous())


def _inverse_frequencies(head_dim: int, rope: RopeSpec) -> torch.Tensor:
    """Return inverse frequencies, float32 `[head_dim / 2]`. `linear` divides positions by `factor`; `llama3` only for
    long wavelengths; `yarn` with a ramp from `beta_slow` to `beta_fast` rotations within the original length.

    Uses the same float32 operations as `transformers`, so that long positions agree to the bit.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    frequency = 1.0 / powers
    if rope.type == "default":
        return frequency
    if rope.type == "linear":
        return frequency / rope.factor
    if rope.type == "llama3":
        return _llama3(frequency, rope)
    if rope.type == "yarn":
        own = 1 - _ramp(head_dim, rope)
        return 1.0 / (rope.factor * powers) * (1 - own) + frequency * own
    raise UnsupportedModel(f"rope type {rope.type!r} is not supported")


def _llama3(frequency: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    low_wavelength = rope.original_max_position_embeddings / low
    high_wavelength = rope.original_max_position_embeddings / high
    scaled = torch.where(wavelength > low_wavelength, frequency / factor, frequency)
    smooth = (rope.original_max_position_embeddings / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, smoothed, scaled)


def _ramp(head_dim: int, rope: RopeSpec) -> torch.Tensor:
    """Return 0 for frequencies that stay unchanged, 1 for those that are divided by the factor."""

    def index_of(rotations: float) -> float:
        """Return the index of the frequency with this many rotations within the original length."""
        length = rope.original_max_position_embeddings
        return (head_dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)


def build_mixture(
    spec: ModelSpec,
    experts: ExpertSpec,
    weights: WeightSource,
    ops: Ops,
    prefix: str,
    rank: int,
    size: int,
    spread: Spread | None = None,
) -> MixtureMLP:
    """Build the mixture. `prefix`: of the layer's MLP. ConfigError if an expert cannot be split over `size` ranks.
    `spread`: with this rank's own experts, whole, in place of a part of each."""
    hidden = spec.hidden_size
    if experts.is_joined:
        return build_joined(hidden, experts, weights, ops, prefix, rank, size, spread)
    bias_E = None
    if experts.has_choice_bias:
        bias_E = weights.take(f"{prefix}.gate.e_score_correction_bias", experts.num_experts, dtype=torch.float32)
    router = Router(
        weight_ED=weights.take(f"{prefix}.gate.weight", experts.num_experts, hidden, dtype=torch.float32),
        rule=experts.rule,
        choice_bias_E=bias_E,
    )
    names = [f"{prefix}.experts.{index}" for index in range(experts.num_experts)]
    cut = rank, size
    if spread is not None:
        own, cut = spread.own(experts.num_experts), (MAIN_RANK, 1)
        others = names[: own.start] + names[own.stop :]
        weights.leave_out(f"{name}.{part}_proj.weight" for name in others for part in ("gate", "up", "down"))
        names = names[own.start : own.stop]
    gate_up_EGD, down_EDI = _stacked(weights, names, experts.intermediate_size, hidden, *cut)
    shared = None
    if experts.shared_intermediate_size:
        shared_name = [f"{prefix}.shared_experts"]
        gate_up, down = _stacked(weights, shared_name, experts.shared_intermediate_size, hidden, rank, size)
        shared = GatedMLP(ops.prepare_gate_up(gate_up[0], None), ops.prepare(down[0], None))
    return MixtureMLP(router, ops.prepare_experts(gate_up_EGD, down_EDI), shared, spread)


def _stacked(
    weights: WeightSource, names: list[str], inner: int, hidden: int, rank: int, size: int
) -> tuple[Weights, Weights]:
    """Return gate and up `[N, 2 I, D]` and down `[N, D, I]` of these MLPs. At most one MLP is in memory twice."""
    if inner < size:
        raise ConfigError(f"tp_size {size}: {inner} rows of an expert cannot be split over {size} ranks")
    own = share_of(inner, size, rank)
    gate_up: Weights | list[KeptBlocks] = []
    down: Weights | list[KeptBlocks] = []
    for index, name in enumerate(names):
        rows = [Rows(f"{name}.{part}_proj.weight", inner, own) for part in ("gate", "up")]
        gate_up = _with(gate_up, index, len(names), weights.take_matrices(rows, hidden))
        down = _with(
            down, index, len(names), weights.take_matrix(f"{name}.down_proj.weight", hidden, inner, columns=own)
        )
    return gate_up, down


def _with(before: Weights, index: int, count: int, weight: Matrix) -> Weights:
    """Return the first `index` of `count` matrices with one more: a list while all are kept small, else one tensor."""
    if isinstance(weight, KeptBlocks) and not isinstance(before, torch.Tensor):
        return [*before, weight]
    numbers = dequantised(weight)
    if not isinstance(before, torch.Tensor):
        stack = numbers.new_empty(count, *numbers.shape)
        for place, each in zip(stack, before, strict=False):
            place.copy_(each.dequantise())
        before = stack
    before[index] = numbers
    return before


def build_latent(
    spec: ModelSpec, latent: LatentSpec, weights: WeightSource, ops: Ops, layer: int, prefix: str, rank: int, size: int
) -> LatentAttentionLayer:
    """Build the attention of layer `layer`. `prefix`: of the names of its tensors."""
    own, hidden, has_bias = share_of(spec.num_heads, size, rank), spec.hidden_size, spec.attention_bias
    head_dim, cache_dim = latent.nope_dim + latent.rope_dim, latent.kv_rank + latent.rope_dim
    q_rows, q_total = range(own.start * head_dim, own.stop * head_dim), spec.num_heads * head_dim

    def bias_of(name: str, length: int) -> torch.Tensor | None:
        return weights.take(f"{prefix}.{name}.bias", length) if has_bias else None

    query_norm_Q = query = None
    if latent.q_rank is None:
        first = _by_halves(weights.take(f"{prefix}.q_proj.weight", q_total, hidden, rows=q_rows), len(own), latent)
        first_bias = first.new_zeros(first.shape[0]) if has_bias else None
    else:
        first = weights.take(f"{prefix}.q_a_proj.weight", latent.q_rank, hidden)
        first_bias = bias_of("q_a_proj", latent.q_rank)
        query_norm_Q = weights.take(f"{prefix}.q_a_layernorm.weight", latent.q_rank)
        q_b = weights.take(f"{prefix}.q_b_proj.weight", q_total, latent.q_rank, rows=q_rows)
        query = ops.prepare(_by_halves(q_b, len(own), latent), None)
    kv_a = _by_halves(weights.take(f"{prefix}.kv_a_proj_with_mqa.weight", cache_dim, hidden), 1, latent)
    kv_a_bias = bias_of("kv_a_proj_with_mqa", cache_dim)
    bias = None
    if first_bias is not None and kv_a_bias is not None:
        bias = torch.cat([first_bias, _by_halves(kv_a_bias.unsqueeze(1), 1, latent).squeeze(1)])
    down, index = [first, kv_a], None
    if latent.index is not None and layer in latent.index.layers:
        index, index_key = _sparse_index(spec, latent, latent.index, weights, f"{prefix}.indexer")
        down.append(index_key)
        bias = torch.cat([bias, bias.new_zeros(latent.index.head_dim)]) if bias is not None else None

    rows = latent.nope_dim + latent.value_dim
    kv_b = weights.take(
        f"{prefix}.kv_b_proj.weight",
        spec.num_heads * rows,
        latent.kv_rank,
        rows=range(own.start * rows, own.stop * rows),
    )
    key_HNL, value_HOL = kv_b.view(len(own), rows, -1).split_with_sizes((latent.nope_dim, latent.value_dim), dim=1)
    columns = range(own.start * latent.value_dim, own.stop * latent.value_dim)
    output = weights.take_matrix(f"{prefix}.o_proj.weight", hidden, spec.num_heads * latent.value_dim, columns=columns)
    output_bias = bias_of("o_proj", hidden)
    return LatentAttentionLayer(
        heads=LatentHeads(
            num_heads=len(own),
            latent_dim=latent.kv_rank,
            rope_dim=latent.rope_dim,
            softmax_scale=latent.softmax_scale,
            eps=INNER_NORM_EPS,
            norm_L=weights.take(f"{prefix}.kv_a_layernorm.weight", latent.kv_rank),
        ),
        down=ops.prepare(torch.cat(down), bias),
        query_norm_Q=query_norm_Q,
        query=query,
        key_HNL=key_HNL.contiguous(),
        value_HLO=value_HOL.transpose(1, 2).contiguous(),
        output=ops.prepare(output, output_bias if rank == MAIN_RANK else None),  # added once, not once per rank
        index=index,
    )


def _sparse_index(
    spec: ModelSpec, latent: LatentSpec, index: IndexSpec, weights: WeightSource, prefix: str
) -> tuple[SparseIndex, torch.Tensor]:
    """Return the index of a layer, and the projection `[I, D]` to an index key."""
    rows, q_rank = index.num_heads * index.head_dim, latent.q_rank
    query_FQ = weights.take(f"{prefix}.wq_b.weight", rows, q_rank or 0)
    key_ID = weights.take(f"{prefix}.wk.weight", index.head_dim, spec.hidden_size)
    norm_I, norm_bias_I = (weights.take(f"{prefix}.k_norm.{kind}", index.head_dim) for kind in ("weight", "bias"))
    heads_GD = weights.take(f"{prefix}.weights_proj.weight", index.num_heads, spec.hidden_size, dtype=torch.float32)
    if index.is_interleaved:
        pairs = torch.arange(latent.rope_dim, device=key_ID.device).view(-1, 2).T.flatten()
        order = torch.cat((pairs, torch.arange(latent.rope_dim, index.head_dim, device=key_ID.device)))
        query_FQ = query_FQ.view(index.num_heads, index.head_dim, -1)[:, order].flatten(0, 1)
        key_ID, norm_I, norm_bias_I = key_ID[order], norm_I[order], norm_bias_I[order]
    scale = index.head_dim**-0.5 * index.num_heads**-0.5
    return SparseIndex(query_FQ, norm_I, norm_bias_I, heads_GD * scale, index.top_k), key_ID


def _by_halves(rows_RI: torch.Tensor, num_heads: int, latent: LatentSpec) -> torch.Tensor:
    """Reorder the last `rope_dim` rows of each head from interleaved pairs, as in the checkpoint, to two halves.

    Scalar products of q and k stay the same, since both are reordered alike.
    """
    if not latent.is_interleaved:
        return rows_RI
    heads_HRI = rows_RI.view(num_heads, -1, rows_RI.shape[1])
    rest, pairs = heads_HRI.split_with_sizes((heads_HRI.shape[1] - latent.rope_dim, latent.rope_dim), dim=1)
    return torch.cat([rest, pairs[:, 0::2], pairs[:, 1::2]], dim=1).flatten(0, 1)


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
    spread: Spread | None = None,
) -> DecoderModel:
    """Build the model from the checkpoint's tensors, or from this rank's part. `num_positions`: of the rotary table."""
    part = part_of(spec, shard.rank, shard.size) if shard is not None else part_of(spec, 0, 1)
    layers = [_layer(spec, traits, weights, ops, part, index, spread) for index in range(spec.num_layers)]
    # Not spread: a guess is one of its own member alone, in whose steps the others have no part.
    draft_layer = _draft_layer(spec, traits, weights, ops, part) if spec.has_draft_layer else None
    own = part.vocabulary[part.rank]
    embedding_VD = _table(spec, weights, EMBEDDING, own)
    embedding = head = ops.prepare(embedding_VD, None)
    if not spec.tie_word_embeddings:
        head = ops.prepare(_table(spec, weights, HEAD, own), None)
    elif weights.has(HEAD) and not torch.equal(
        dequantised(_table(spec, weights, HEAD, own)), dequantised(embedding_VD)
    ):
        raise UnsupportedModel(
            "tie_word_embeddings is true, but the checkpoint has an lm_head.weight of its own: "
            "versions of transformers disagree on which is used; set it to false if the head is right"
        )
    final_norm_D = weights.take("model.norm.weight", spec.hidden_size)
    weights.ignore(UNUSED_SUFFIX)
    if spec.num_extra_layers:  # for multi-token prediction; what is left of them the model does not need
        weights.ignore_layers(range(spec.num_layers, spec.num_layers + spec.num_extra_layers))
    weights.finish()
    rotated = spec.head_dim if spec.latent is None else spec.latent.rope_dim
    assert spec.rope is not None  # our own code computes it
    return DecoderModel(
        ops=ops,
        embedding=embedding,
        layers=layers,
        final_norm_D=final_norm_D,
        head=head,
        rotary=rotary_table(rotated, spec.rope, num_positions, device),
        eps=spec.rms_norm_eps,
        shard=shard,
        vocabulary=part.vocabulary,
        draft_layer=draft_layer,
    )


def _draft_layer(spec: ModelSpec, traits: Traits, weights: WeightSource, ops: Ops, part: Part) -> DraftLayer:
    """Build the layer behind the last one. Embedding and head, of which published checkpoints have copies there, are
    the model's. Raises ConfigError if the checkpoint lacks it."""
    prefix, hidden = f"model.layers.{spec.num_layers}", spec.hidden_size
    if not weights.has(f"{prefix}.eh_proj.weight"):
        raise ConfigError(f"{KEY}, but the checkpoint has no tensor {prefix}.eh_proj.weight: it lacks that layer")
    return DraftLayer(
        token_norm_D=weights.take(f"{prefix}.enorm.weight", hidden),
        hidden_norm_D=weights.take(f"{prefix}.hnorm.weight", hidden),
        join=ops.prepare(weights.take_matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden), None),
        layer=_layer(spec, traits, weights, ops, part, spec.num_layers),
        final_norm_D=weights.take(f"{prefix}.shared_head.norm.weight", hidden),
    )


def _table(spec: ModelSpec, weights: WeightSource, name: str, rows: range) -> Matrix:
    return weights.take_matrix(name, spec.vocab_size, spec.hidden_size, rows=rows)


def _layer(
    spec: ModelSpec,
    traits: Traits,
    weights: WeightSource,
    ops: Ops,
    part: Part,
    index: int,
    spread: Spread | None = None,
) -> DecoderLayer:
    prefix, hidden = f"model.layers.{index}", spec.hidden_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return DecoderLayer(
        input_norm_D=weights.take(f"{prefix}.input_layernorm.weight", hidden),
        attention=(
            _attention(spec, traits, weights, ops, part, attention, spec.window_of(index))
            if spec.latent is None
            else build_latent(spec, spec.latent, weights, ops, index, attention, part.rank, part.size)
        ),
        post_attention_norm_D=weights.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=(
            build_mixture(spec, spec.experts, weights, ops, mlp, part.rank, part.size, spread)
            if spec.experts is not None and index in spec.experts.layers
            else _mlp(spec, weights, ops, part, mlp)
        ),
    )


def _attention(
    spec: ModelSpec,
    traits: Traits,
    weights: WeightSource,
    ops: Ops,
    part: Part,
    prefix: str,
    window: int | None,
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
        window,
        _sinks(spec, weights, part, prefix) if traits.sinks else None,
    )
    return AttentionLayer(
        heads=heads,
        qkv=ops.prepare(*_by_output(weights, prefix, cuts, spec.hidden_size, traits.qkv_bias)),
        output=_by_input(spec, weights, ops, part, f"{prefix}.o_proj", q_rows, part.query, traits.output_bias),
    )


def _sinks(spec: ModelSpec, weights: WeightSource, part: Part, prefix: str) -> torch.Tensor:
    own = range(part.query.start // spec.head_dim, part.query.stop // spec.head_dim)
    return weights.take(f"{prefix}.sinks", spec.num_heads, rows=own, dtype=torch.float32)


def _mlp(spec: ModelSpec, weights: WeightSource, ops: Ops, part: Part, prefix: str) -> GatedMLP:
    inner, has_bias = spec.intermediate_size, spec.mlp_bias
    cuts = [Rows("gate_proj", inner, part.inner), Rows("up_proj", inner, part.inner)]
    return GatedMLP(
        gate_up=ops.prepare_gate_up(*_by_output(weights, prefix, cuts, spec.hidden_size, has_bias)),
        down=_by_input(spec, weights, ops, part, f"{prefix}.down_proj", inner, part.inner, has_bias),
    )


def _by_output(
    weights: WeightSource, module: str, cuts: list[Rows], inputs: int, has_bias: bool
) -> tuple[Matrix, torch.Tensor | None]:
    """Return these rows of several matrices as one matrix, and their biases as one vector."""

    def parts(kind: str) -> list[Rows]:
        return [cut._replace(name=f"{module}.{cut.name}.{kind}") for cut in cuts]

    return weights.take_matrices(parts("weight"), inputs), weights.take_rows(parts("bias")) if has_bias else None


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
    weight = weights.take_matrix(f"{name}.weight", spec.hidden_size, total, columns=columns)
    bias_D = weights.take(f"{name}.bias", spec.hidden_size) if has_bias else None
    return ops.prepare(weight, bias_D if part.is_main else None)  # added once, not once per rank
