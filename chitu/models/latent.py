"""Builds a layer of latent attention from a checkpoint's tensors. Called by `common.py` while a model is loaded.

The weights are absorbed here: the projection from the latent is split, per head, into a part that multiplies q and a
part that multiplies the result. Tensor parallelism: a rank has its heads of q, of both parts and of the output
projection. Every rank computes the latent itself, since the cache of every rank holds it.
"""

from __future__ import annotations

import torch

from chitu.config.tensor_parallel import MAIN_RANK, share_of
from chitu.layers.latent import INNER_NORM_EPS, LatentAttentionLayer
from chitu.models.config import ModelSpec
from chitu.models.latent_spec import LatentSpec
from chitu.models.weights import WeightSource
from chitu.ops.interface import LatentHeads, Ops


def build_latent(
    spec: ModelSpec, latent: LatentSpec, weights: WeightSource, ops: Ops, prefix: str, rank: int, size: int
) -> LatentAttentionLayer:
    """Build the layer. `prefix`: of the names of its attention tensors."""
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

    rows = latent.nope_dim + latent.value_dim
    kv_b = weights.take(
        f"{prefix}.kv_b_proj.weight",
        spec.num_heads * rows,
        latent.kv_rank,
        rows=range(own.start * rows, own.stop * rows),
    )
    key_HNL, value_HOL = kv_b.view(len(own), rows, -1).split_with_sizes((latent.nope_dim, latent.value_dim), dim=1)
    columns = range(own.start * latent.value_dim, own.stop * latent.value_dim)
    output = weights.take(f"{prefix}.o_proj.weight", hidden, spec.num_heads * latent.value_dim, columns=columns)
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
        down=ops.prepare(torch.cat([first, kv_a]), bias),
        query_norm_Q=query_norm_Q,
        query=query,
        key_HNL=key_HNL.contiguous(),
        value_HLO=value_HOL.transpose(1, 2).contiguous(),
        output=ops.prepare(output, output_bias if rank == MAIN_RANK else None),  # added once, not once per rank
    )


def _by_halves(rows_RI: torch.Tensor, num_heads: int, latent: LatentSpec) -> torch.Tensor:
    """Reorder the last `rope_dim` rows of each head from interleaved pairs, as in the checkpoint, to two halves.

    Scalar products of q and k stay the same, since both are reordered alike.
    """
    if not latent.is_interleaved:
        return rows_RI
    heads_HRI = rows_RI.view(num_heads, -1, rows_RI.shape[1])
    rest, pairs = heads_HRI.split_with_sizes((heads_HRI.shape[1] - latent.rope_dim, latent.rope_dim), dim=1)
    return torch.cat([rest, pairs[:, 0::2], pairs[:, 1::2]], dim=1).flatten(0, 1)
