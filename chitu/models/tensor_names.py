"""Names and shapes of the tensors that a model takes from its checkpoint, known before anything is read. No torch.

Used by `checkpoint.py`. A test requires for every family that it is what `common.py`, `experts.py` and `latent.py`
take.
"""

from __future__ import annotations

from collections.abc import Iterator

from chitu.models.config import ModelSpec
from chitu.models.expert_spec import ExpertSpec
from chitu.models.latent_spec import LatentSpec
from chitu.models.traits import Traits

HEAD = "lm_head.weight"
UNUSED_SUFFIX = "rotary_emb.inv_freq"
"""End of the names of tensors that hold nothing the model needs."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(spec: ModelSpec, traits: Traits) -> Shapes:
    """Yield name and shape of each tensor that the model takes, except a head that is tied to the embedding."""
    hidden = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        yield from _attention(spec, traits, attention) if spec.latent is None else _latent(spec, spec.latent, attention)
        if spec.experts is not None and index in spec.experts.layers:
            yield from _mixture(spec.experts, hidden, mlp)
        else:
            yield from _mlp(mlp, spec.intermediate_size, hidden, spec.mlp_bias)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_word_embeddings:
        yield HEAD, (spec.vocab_size, hidden)


def _linear(name: str, outputs: int, inputs: int, has_bias: bool = False) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _attention(spec: ModelSpec, traits: Traits, prefix: str) -> Shapes:
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _linear(f"{prefix}.q_proj", heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.k_proj", kv_heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.v_proj", kv_heads, hidden, traits.qkv_bias)
    yield from _linear(f"{prefix}.o_proj", hidden, heads, traits.output_bias)
    if traits.qk_norm:
        yield f"{prefix}.q_norm.weight", (spec.head_dim,)
        yield f"{prefix}.k_norm.weight", (spec.head_dim,)


def _latent(spec: ModelSpec, latent: LatentSpec, prefix: str) -> Shapes:
    hidden, has_bias, num_heads = spec.hidden_size, spec.attention_bias, spec.num_heads
    queries = num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear(f"{prefix}.q_proj", queries, hidden)
    else:
        yield from _linear(f"{prefix}.q_a_proj", latent.q_rank, hidden, has_bias)
        yield f"{prefix}.q_a_layernorm.weight", (latent.q_rank,)
        yield from _linear(f"{prefix}.q_b_proj", queries, latent.q_rank)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, has_bias)
    yield f"{prefix}.kv_a_layernorm.weight", (latent.kv_rank,)
    yield from _linear(f"{prefix}.kv_b_proj", num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield from _linear(f"{prefix}.o_proj", hidden, num_heads * latent.value_dim, has_bias)


def _mixture(experts: ExpertSpec, hidden: int, prefix: str) -> Shapes:
    yield f"{prefix}.gate.weight", (experts.num_experts, hidden)
    if experts.has_choice_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (experts.num_experts,)
    for index in range(experts.num_experts):
        yield from _mlp(f"{prefix}.experts.{index}", experts.intermediate_size, hidden)
    if experts.shared_intermediate_size:
        yield from _mlp(f"{prefix}.shared_experts", experts.shared_intermediate_size, hidden)


def _mlp(prefix: str, inner: int, hidden: int, has_bias: bool = False) -> Shapes:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, has_bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, has_bias)
