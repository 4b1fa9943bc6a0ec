"""The decoder that all families share: embedding, layers of attention and gated MLP or experts, norm, head. Holds no
state of any request. `common.py` maps the tensors of a checkpoint to it.

q, k and v are one weight, and so are gate and up: one large product instead of several. With tensor parallelism each
rank has some heads, MLP columns and vocabulary rows. q, k, v, gate and up are split by output and need no
communication. The output and down projections are split by input, so their results are summed over the ranks, as is the
embedding. Logits are gathered on rank 0. The calls to other ranks (`engine/rank_groups.py`) are collective: every rank
runs the same layers, with the same calls in the same order.

*Latent attention* with absorbed weights (DeepSeek-V2, section 2.1) is the same for prefill and decode. A token has one
row in the cache: a normed latent, from which keys and values of all heads are linear maps, and one rotated key. So a
head's query is mapped into the latent space (the key weight is applied to the query instead of to every key) and
attends to the cache as if all heads shared one KV head; the value weight is applied to the result. The cache is never
expanded. Shapes: H heads, Q rank of q, L of the latent, R rotated part, C = L + R a row of the cache, E = N + R a head
of q, N its part that is not rotated, O a head of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from chitu.config.tensor_parallel import MAIN_RANK
from chitu.errors import Internal
from chitu.models.generic.window_attention import heads_in_rings
from chitu.models.model import KVViews
from chitu.models.window_state import KEYS, VALUES
from chitu.ops.interface import (
    AdapterRows,
    Batch,
    ExpertWeights,
    HeadSpec,
    LatentHeads,
    LinearWeight,
    Ops,
    RotaryTable,
    Routes,
    no_callback,
)
from chitu.ops.routing import Router
from chitu.ops.sparse_index import ChosenPositions, append_keys, choose, chosen_attention, rotated

INNER_NORM_EPS = 1e-6
"""Epsilon of the norms on q and on the latent, whatever epsilon the config has for the other norms."""


class Shard(Protocol):
    """This rank among `size`. Called only by the step thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' `x` in place. Every rank gets the same bits. Returns when all ranks have contributed."""
        ...

    def gather_columns(self, x_RC: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Return the ranks' columns side by side, `[R, sum(widths)]`, rank i having `widths[i]`; None off rank 0."""
        ...

    def broadcast(self, x: torch.Tensor) -> Callable[[], None]:
        """Begin to overwrite `x` of every rank with that of rank 0, which has the same shape and dtype. Return what
        waits for it, in the queue of a device that has one. Nothing else may use `x` before."""
        ...


Compute = Callable[[torch.Tensor, Routes], torch.Tensor]
"""Returns the weighted sums of this rank's own experts, `[T, D]`; the routes count them from 0."""


class Spread(Protocol):
    """The ranks among which whole experts are spread. Called only by the step thread."""

    def own(self, num_experts: int) -> range:
        """Return the experts of a layer that this rank holds."""
        ...

    def own_part(self, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute) -> torch.Tensor:
        """Return `[T, D]`: each row's weighted sum over this rank's own experts. No other rank has a part in it."""
        ...

    def mixture(self, x_TD: torch.Tensor, routes: Routes, num_experts: int, compute: Compute) -> torch.Tensor:
        """Return `[T, D]`, a new tensor: each row's weighted sum over the experts of all ranks of equal TP rank, the
        part of this TP rank. Collective: once for each layer with experts, by the ranks that lend, too."""
        ...


@dataclass(frozen=True, slots=True)
class SparseIndex:
    """Which positions a row of sparse latent attention sees. Every rank has all heads, so all ranks choose alike."""

    query_FQ: torch.Tensor
    """Projection `[G I, Q]` of the normed q."""
    key_norm_I: torch.Tensor
    """Weight of the layer norm on the key, whose projection is the last `I` rows of the layer's `down`."""
    key_norm_bias_I: torch.Tensor
    weights_GD: torch.Tensor
    """Projection to the weights of the heads, float32, times the scale of the scores."""
    top_k: int

    @property
    def key_dim(self) -> int:
        return self.key_norm_I.shape[0]


@dataclass(frozen=True, slots=True)
class LatentAttentionLayer:
    heads: LatentHeads
    down: LinearWeight
    """Projections of the hidden state: `[Q + C, D]`, or `[H E + C, D]` without a rank of q; of an index key behind."""
    query_norm_Q: torch.Tensor | None
    query: LinearWeight | None
    """Projection `[H E, Q]` of q; None if `down` has it."""
    key_HNL: torch.Tensor
    """Projection from latent to key, transposed, to apply to q."""
    value_HLO: torch.Tensor
    output: LinearWeight
    """Projection `[D, H O]`."""
    index: SparseIndex | None = None
    """None if the layer attends to what the layer before has chosen, or to all positions if none has an index."""

    def mix(
        self,
        ops: Ops,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        rotary: RotaryTable,
        batch: Batch,
        pages: tuple[torch.Tensor, torch.Tensor],
        on_written: Callable[[], None],
        choice: ChosenPositions | None,
    ) -> tuple[torch.Tensor, ChosenPositions | None]:
        """Return `[T, H O]`, the input of `output`, and what was chosen. Calls `on_written` when the rows are in the
        cache. `pages`: of latents and of index keys; `choice`: of the layer before."""
        heads, index, pages_PKSC = self.heads, self.index, pages[0]
        weights_TG = None
        if index is None:
            down_TF = ops.norm_linear(x_TD, norm_D, eps, self.down)
        else:
            normed_TD = ops.rms_norm(x_TD, norm_D, eps)
            weights_TG = F.linear(normed_TD.float(), index.weights_GD)
            down_TF = ops.linear(normed_TD, self.down)
            down_TF, key_TI = down_TF.tensor_split((down_TF.shape[1] - index.key_dim,), dim=1)
            key_TI = F.layer_norm(key_TI, (index.key_dim,), index.key_norm_I, index.key_norm_bias_I, INNER_NORM_EPS)
            key_TI = rotated(key_TI.unsqueeze(1), heads.rope_dim, rotary, batch.positions_T).squeeze(1)
            append_keys(key_TI, batch, pages[1])
        rest = down_TF.shape[1] - heads.latent_dim - heads.rope_dim
        q_TF, kv_TC = down_TF.split_with_sizes((rest, heads.latent_dim + heads.rope_dim), dim=1)
        # Before q is computed, since the operations may reuse the memory of `down_TF`.
        ops.latent_append(kv_TC, heads, rotary, batch, pages_PKSC)
        on_written()
        if self.query is not None and self.query_norm_Q is not None:
            q_TQ = q_TF.contiguous()
            if index is not None and weights_TG is not None:
                normed_TQ = ops.rms_norm(q_TQ, self.query_norm_Q, INNER_NORM_EPS)
                choice = self._choose(index, normed_TQ, weights_TG, rotary, batch, pages[1])
            q_TF = ops.norm_linear(q_TQ, self.query_norm_Q, INNER_NORM_EPS, self.query)
        q_THC = ops.latent_query(q_TF.view(q_TF.shape[0], heads.num_heads, -1), self.key_HNL, heads, rotary, batch)
        if choice is not None:
            mixed_THL = chosen_attention(q_THC, heads, batch, pages_PKSC, choice)
        else:
            mixed_THL = ops.latent_attention(q_THC, heads, batch, pages_PKSC)
        values_HTO = torch.bmm(mixed_THL.transpose(0, 1), self.value_HLO)
        return values_HTO.transpose(0, 1).flatten(1), choice

    def _choose(
        self,
        index: SparseIndex,
        q_TQ: torch.Tensor,
        weights_TG: torch.Tensor,
        rotary: RotaryTable,
        batch: Batch,
        pages_PKSI: torch.Tensor,
    ) -> ChosenPositions | None:
        q_TGI = F.linear(q_TQ, index.query_FQ).view(q_TQ.shape[0], -1, index.key_dim)
        q_TGI = rotated(q_TGI, self.heads.rope_dim, rotary, batch.positions_T)
        return choose(q_TGI, weights_TG, batch, pages_PKSI, index.top_k)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    heads: HeadSpec
    qkv: LinearWeight
    """Projection `[(H + 2 K) N, D]`."""
    output: LinearWeight
    """Projection `[D, H N]`."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate_up: LinearWeight
    """Weight `[2 I, D]`, gate rows first."""
    down: LinearWeight
    """Weight `[D, I]`."""


@dataclass(frozen=True, slots=True)
class MixtureMLP:
    """Experts, of which each row uses a few, and optionally an MLP that all rows use."""

    router: Router
    experts: ExpertWeights
    shared: GatedMLP | None = None
    spread: Spread | None = None
    """Ranks among which the experts are spread: `experts` are this rank's own, whole. None: parts of all experts."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm_D: torch.Tensor
    attention: AttentionLayer | LatentAttentionLayer
    post_attention_norm_D: torch.Tensor
    mlp: GatedMLP | MixtureMLP


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The layer that drafts (`draft_layer.py`). Its input joins a token and the hidden state before it."""

    token_norm_D: torch.Tensor
    hidden_norm_D: torch.Tensor
    join: LinearWeight
    """Projection `[D, 2 D]`: of the normed embedding, and behind it the normed hidden state."""
    layer: DecoderLayer
    final_norm_D: torch.Tensor
    """Norm before the model's head."""


class Linears(Protocol):
    """The products with a layer's weights: those of `Ops`, or with what adapters add (`lora.py`)."""

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor: ...

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor: ...

    def norm_linear(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight
    ) -> torch.Tensor: ...

    def norm_gate_up(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight
    ) -> torch.Tensor: ...


class Adapting(Protocol):
    """The loaded LoRA adapters."""

    def linears(self, adapted: Sequence[AdapterRows]) -> Linears:
        """Return the products of a step in which these rows have adapters."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Weights and constants of a loaded model, or of one rank's part of it."""

    ops: Ops
    embedding: LinearWeight
    """Rows `[V, D]` of the tokens; the same weight as `head` if the two are tied."""
    layers: Sequence[DecoderLayer]
    final_norm_D: torch.Tensor
    head: LinearWeight
    rotary: RotaryTable
    eps: float
    shard: Shard | None = None
    """This rank among the ranks; None if this is the whole model."""
    vocabulary: Sequence[range] = ()
    """Rows of embedding and head on each rank; used only with a shard."""
    adapters: Adapting | None = None
    draft_layer: DraftLayer | None = None

    def forward(
        self,
        token_ids_T: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Return hidden states `[T, D]` before the final norm, and write K and V of all rows into the pages.

        Calls `on_layer(l)` as soon as K and V of layer l are in the pages: on a single rank, before its attention is
        computed; with several ranks, after the sum that follows attention, which no rank joins before its K and V are
        in its pages.
        """
        linears = self._linears(batch)
        x_TD = self._embed(token_ids_T)
        choice: ChosenPositions | None = None
        for index, layer in enumerate(self.layers):
            x_TD, choice = self._compute(layer, index, linears, x_TD, batch, cache, on_layer, choice)
        return x_TD

    def draft(
        self,
        token_ids_T: torch.Tensor,
        before_TD: torch.Tensor,
        is_hole_T: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the entries of the layer that drafts, as `forward` computes those of the others, and return hidden
        states `[T, D]` for `draft_logits`. `before_TD`: of the position before each row, behind the final norm;
        `is_hole_T`: rows for which it is not known, whose entry is that of an input of zeros."""
        draft_layer, ops = self.draft_layer, self.ops
        assert draft_layer is not None
        x_TD = self._embed(token_ids_T)
        num_rows, width = x_TD.shape
        joined_TI = x_TD.new_empty(num_rows, 2 * width)
        joined_TI[:, :width] = ops.rms_norm(x_TD, draft_layer.token_norm_D, self.eps)
        joined_TI[:, width:] = ops.rms_norm(before_TD, draft_layer.hidden_norm_D, self.eps)
        x_TD = ops.linear_add(joined_TI, draft_layer.join, torch.zeros_like(x_TD))
        x_TD.masked_fill_(is_hole_T.unsqueeze(1), 0)
        x_TD, _ = self._compute(draft_layer.layer, len(self.layers), ops, x_TD, batch, cache, on_layer, None)
        return x_TD

    def draft_normed(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return rows of `draft`'s result as hidden states for its next call, as `normed` does."""
        assert self.draft_layer is not None
        return self.ops.rms_norm(hidden_RD, self.draft_layer.final_norm_D, self.eps)

    def draft_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor | None:
        """Return logits of chosen rows of `draft`'s result, as `logits` does."""
        assert self.draft_layer is not None
        return self._logits(hidden_RD, self.draft_layer.final_norm_D)

    def _compute(
        self,
        layer: DecoderLayer,
        index: int,
        linears: Linears,
        x_TD: torch.Tensor,
        batch: Batch,
        cache: KVViews,
        on_layer: Callable[[int], None] | None,
        choice: ChosenPositions | None,
    ) -> tuple[torch.Tensor, ChosenPositions | None]:
        """Return `x_TD` behind a layer, and which positions it has chosen."""
        ops, attention, k_PKSN, v_PKSN = self.ops, layer.attention, cache.k[index], cache.v[index]
        soon: Callable[[], None] = no_callback
        if on_layer is not None and self.shard is None:
            soon = functools.partial(on_layer, index)
        if isinstance(attention, AttentionLayer) and (index, KEYS) in cache.states:
            qkv_TC = linears.norm_linear(x_TD, layer.input_norm_D, self.eps, attention.qkv)
            rings = cache.states[index, KEYS], cache.states[index, VALUES]
            mixed_TC = heads_in_rings(qkv_TC, attention.heads, self.rotary, batch, *rings)
            soon()
        elif isinstance(attention, AttentionLayer):
            qkv_TC = linears.norm_linear(x_TD, layer.input_norm_D, self.eps, attention.qkv)
            mixed_TC = ops.append_attention(qkv_TC, attention.heads, self.rotary, batch, k_PKSN, v_PKSN, soon)
        else:
            norm_D, pages = layer.input_norm_D, (k_PKSN, v_PKSN)
            mixed_TC, choice = attention.mix(ops, x_TD, norm_D, self.eps, self.rotary, batch, pages, soon, choice)
        x_TD = self._linear_add(linears, mixed_TC, attention.output, x_TD)
        if on_layer is not None and self.shard is not None:
            on_layer(index)
        return self._mlp_add(linears, x_TD, layer.post_attention_norm_D, layer.mlp), choice

    @property
    def num_positions(self) -> int:
        return self.rotary.cos.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.head.out_features if self.shard is None else self.vocabulary[-1].stop

    @property
    def hidden_size(self) -> int:
        return self.embedding.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm_D.dtype

    @property
    def is_main(self) -> bool:
        """Whether this rank gets the logits."""
        return self.shard is None or self.shard.rank == MAIN_RANK

    def logits(self, hidden_RD: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return float32 logits `[R, V]` of chosen rows of `forward`'s result, in `out` if that is given; None on all
        ranks but the main one."""
        return self._logits(hidden_RD, self.final_norm_D, out_RV)

    def _logits(
        self, hidden_RD: torch.Tensor, norm_D: torch.Tensor, out_RV: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if self.shard is None:
            return self.ops.norm_logits(hidden_RD, norm_D, self.eps, self.head, out_RV)
        own_RV = self.ops.norm_logits(hidden_RD, norm_D, self.eps, self.head)
        logits_RV = self.shard.gather_columns(own_RV, [len(rows) for rows in self.vocabulary])
        return logits_RV if logits_RV is None or out_RV is None else out_RV.copy_(logits_RV)

    def normed(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return chosen rows of `forward`'s result behind the final norm. The next call may reuse the memory."""
        return self.ops.rms_norm(hidden_RD, self.final_norm_D, self.eps)

    def _linears(self, batch: Batch) -> Linears:
        if not batch.adapters:
            return self.ops
        if self.adapters is None:
            raise Internal(f"rows with LoRA adapters ({batch.adapters}), and none is loaded")
        return self.adapters.linears(batch.adapters)

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self.shard is None:
            return self.ops.rows_of(self.embedding, token_ids_T)
        rows = self.vocabulary[self.shard.rank]
        elsewhere_T = (token_ids_T < rows.start) | (token_ids_T >= rows.stop)
        x_TD = self.ops.rows_of(self.embedding, (token_ids_T - rows.start).masked_fill_(elsewhere_T, 0))
        return self.shard.all_reduce(x_TD.masked_fill_(elsewhere_T.unsqueeze(1), 0))

    def _mlp_add(
        self, linears: Linears, x_TD: torch.Tensor, norm_D: torch.Tensor, mlp: GatedMLP | MixtureMLP
    ) -> torch.Tensor:
        """Compute `x += mlp(norm(x))`, in place."""
        ops = self.ops
        if isinstance(mlp, GatedMLP):
            gated_TI = linears.norm_gate_up(x_TD, norm_D, self.eps, mlp.gate_up)
            return self._linear_add(linears, gated_TI, mlp.down, x_TD)
        normed_TD = ops.rms_norm(x_TD, norm_D, self.eps)
        # Every TP rank has the whole router, so all of them route alike.
        routes = ops.route(normed_TD, mlp.router)
        if mlp.spread is None:
            mixed_TD = ops.mixture(normed_TD, routes, mlp.experts)
        else:
            normed_TD = normed_TD.clone()  # the operations may reuse its memory for the rows of others
            mixed_TD = self._spread_mixture(normed_TD, routes, mlp, mlp.spread)
        if mlp.shared is not None:
            mixed_TD = ops.linear_add(ops.gate_up(normed_TD, mlp.shared.gate_up), mlp.shared.down, mixed_TD)
        return x_TD.add_(mixed_TD if self.shard is None else self.shard.all_reduce(mixed_TD))

    def lend(self) -> None:
        """Compute this rank's experts for the rows of others, in a step in which it has none of its own."""
        nothing_0D = self.final_norm_D.new_empty(0, self.hidden_size)
        for layer in self.layers:
            mlp = layer.mlp
            if isinstance(mlp, MixtureMLP) and mlp.spread is not None:
                no_weights = mlp.router.weight_ED.new_empty(0, mlp.router.rule.top_k)
                self._spread_mixture(nothing_0D, Routes(no_weights.long(), no_weights), mlp, mlp.spread)

    def _spread_mixture(self, x_TD: torch.Tensor, routes: Routes, mlp: MixtureMLP, spread: Spread) -> torch.Tensor:
        num_experts = mlp.router.weight_ED.shape[0]
        return spread.mixture(x_TD, routes, num_experts, lambda x, own: self.ops.mixture(x, own, mlp.experts))

    def _linear_add(
        self, linears: Linears, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor
    ) -> torch.Tensor:
        """Compute `residual += x W^T + b` in place, summed over the ranks' parts of the input."""
        if self.shard is None:
            return linears.linear_add(x_TI, weight, residual_TD)
        return residual_TD.add_(self.shard.all_reduce(linears.linear(x_TI, weight)))
