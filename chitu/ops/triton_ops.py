"""The operations on a CUDA device: our own Triton kernels for work bound by memory and launches, torch for large matrix
products. Everything can be captured in a CUDA graph.

A recorded step has no spans on the host. So for it nothing here reads a batch's host side except the number of rows:
the device reads all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chitu.errors import Internal
from chitu.ops.interface import (
    Batch,
    ExpertBiases,
    ExpertWeights,
    HeadSpec,
    LatentHeads,
    LinearWeight,
    RotaryTable,
    Routes,
    Span,
    no_callback,
)
from chitu.ops.kept import Form, KeptBlocks, Matrix, Weights, dequantised, stack_of
from chitu.ops.kept_on_cards import keeps_on_cards
from chitu.ops.kernels.attention import (
    PROGRAMS_EACH,
    append_attention,
    decode_attention,
    is_narrow,
    num_splits_for,
    prefill_attention,
)
from chitu.ops.kernels.mla import latent_append, latent_decode, latent_prefill, latent_query, queries_for
from chitu.ops.kernels.moe import mixture
from chitu.ops.kernels.rope import rope_append
from chitu.ops.kernels.router import counters, route
from chitu.ops.kernels.rows import rms_norm, silu_mul
from chitu.ops.kernels.small_linear import MAX_ROWS, small_linear
from chitu.ops.kernels.widen import wide_linear
from chitu.ops.routing import Router
from chitu.ops.routing_rule import ClampedGate
from chitu.ops.scaled_weights import ScaledStack, ScaledWeight, Scales, is_kept, scaled_stack, scaled_weight
from chitu.ops.torch_ops import PlainWeight
from chitu.ops.whole_prompts import WHOLE_PROMPT_TOKENS, AttentionPlan, whole_prompt


@dataclass(frozen=True, slots=True)
class CardExperts:
    """Every expert's gate, up and down in one tensor each, with scales if they stay small."""

    gate_up_EGD: torch.Tensor | ScaledStack
    """Weights `[E, 2 I, D]`, gate rows first."""
    down_EDI: torch.Tensor | ScaledStack
    biases: ExpertBiases | None = None
    gate: ClampedGate | None = None

    @property
    def num_experts(self) -> int:
        down = self.down_EDI
        return (down if isinstance(down, torch.Tensor) else down.weight).shape[0]


class TritonOps:
    """An `Ops` for CUDA. `num_multiprocessors`: of the device, for the splits of decode attention. `has_e4m3`: whether
    kernels can read e4m3 there. Weights of it, and of 4 bits everywhere, stay as small as they are
    (`scaled_weights.py`).

    Attention of spans: torch's library (`whole_prompts.py`) for those that begin a sequence and have at least
    `whole_prompt_tokens`, our own kernel for the rest, and for windows and sinks. Recorded steps use our own kernel.
    """

    name = "triton"

    def __init__(
        self, num_multiprocessors: int, whole_prompt_tokens: int = WHOLE_PROMPT_TOKENS, has_e4m3: bool = True
    ) -> None:
        self._num_multiprocessors = num_multiprocessors
        self._has_e4m3 = has_e4m3
        self._whole_prompt_tokens = whole_prompt_tokens
        self._routes: AttentionPlan | None = None
        self._arrived: torch.Tensor | None = None

    def keeps(self, form: Form, run: int, inputs: int) -> bool:
        return (self._has_e4m3 or form != "e4m3") and keeps_on_cards(form, run, inputs)

    def beside(self) -> TritonOps:
        """Refuse: kernels keep tables for one queue."""
        raise Internal("the kernels of a GPU run in one queue")

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        if isinstance(weight, KeptBlocks) and is_kept(weight, self._has_e4m3):
            return scaled_weight(weight, bias)
        return PlainWeight(dequantised(weight).contiguous(), bias)

    def prepare_gate_up(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        return self.prepare(weight, bias)

    def rows_of(self, weight: LinearWeight, rows_T: torch.Tensor) -> torch.Tensor:
        w = _prepared(weight)
        if isinstance(w, PlainWeight):
            return w.weight[rows_T]
        return w.rows_of(rows_T)

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        w = _prepared(weight)
        if x_TI.shape[0] > MAX_ROWS and isinstance(w, PlainWeight):
            return F.linear(x_TI, w.weight, w.bias)
        out_TO = x_TI.new_empty(x_TI.shape[0], w.out_features)
        if x_TI.shape[0] > MAX_ROWS and isinstance(w, ScaledWeight):
            wide_linear(x_TI, w.weight, w.scales, w.bias, out_TO)
        else:
            small_linear(x_TI.contiguous(), w.weight, w.bias, out_TO, scales=_scales(w))
        return out_TO

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor:
        w = _prepared(weight)
        if x_TI.shape[0] > MAX_ROWS:
            if isinstance(w, ScaledWeight):
                wide_linear(x_TI, w.weight, w.scales, w.bias, residual_TD, is_added=True)
                return residual_TD
            if w.bias is not None:
                residual_TD.add_(w.bias)
            return residual_TD.addmm_(x_TI, w.weight.T)
        small_linear(x_TI.contiguous(), w.weight, w.bias, residual_TD, scales=_scales(w), is_added=True)
        return residual_TD

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._gate_up(x_TD, None, 0.0, weight)

    def gate_and_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self.linear(x_TD, weight)

    def norm_linear(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        if not _norms_within(x_TD):
            return self.linear(self.rms_norm(x_TD, norm_D, eps), weight)
        w = _prepared(weight)
        out_TO = x_TD.new_empty(x_TD.shape[0], w.out_features)
        small_linear(x_TD, w.weight, w.bias, out_TO, scales=_scales(w), norm_I=norm_D, eps=eps)
        return out_TO

    def norm_logits(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _norms_within(x_TD):
            logits_TV = self.norm_linear(x_TD, norm_D, eps, weight)
            return logits_TV.float() if out_TV is None else out_TV.copy_(logits_TV)
        w = _prepared(weight)
        if out_TV is None:
            out_TV = x_TD.new_empty(x_TD.shape[0], w.out_features, dtype=torch.float32)
        small_linear(x_TD, w.weight, w.bias, out_TV, scales=_scales(w), norm_I=norm_D, eps=eps)
        return out_TV

    def norm_gate_up(self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: LinearWeight) -> torch.Tensor:
        return self._gate_up(x_TD, norm_D, eps, weight)

    def _gate_up(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor | None, eps: float, weight: LinearWeight
    ) -> torch.Tensor:
        w = _prepared(weight)
        out_TI = x_TD.new_empty(x_TD.shape[0], w.out_features // 2)
        if norm_D is not None and not _norms_within(x_TD):
            x_TD, norm_D = self.rms_norm(x_TD, norm_D, eps), None
        if x_TD.shape[0] <= MAX_ROWS:
            small_linear(x_TD, w.weight, w.bias, out_TI, scales=_scales(w), norm_I=norm_D, eps=eps, is_gated=True)
        else:
            silu_mul(self.linear(x_TD, w), out_TI)
        return out_TI

    def prepare_experts(
        self,
        gate_up_EGD: Weights,
        down_EDI: Weights,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> ExpertWeights:
        experts = CardExperts(self._stack(gate_up_EGD), self._stack(down_EDI), biases, gate)
        self._counters(_parts(experts.down_EDI)[0].device)  # before a step is recorded
        return experts

    def _stack(self, weights_EOI: Weights) -> torch.Tensor | ScaledStack:
        kept = scaled_stack(weights_EOI, self._has_e4m3)
        return stack_of(weights_EOI).contiguous() if kept is None else kept

    def route(self, x_TD: torch.Tensor, router: Router) -> Routes:
        return route(x_TD, router, self._counters(x_TD.device), self._num_multiprocessors)

    def _counters(self, device: torch.device) -> torch.Tensor:
        """Return the counters of programs of the router, and of decode attention, which has splits for fewer rows and
        heads than this. No two steps run at once."""
        if self._arrived is None:
            self._arrived = counters(device, PROGRAMS_EACH * self._num_multiprocessors)
        return self._arrived

    def mixture(self, x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
        if not isinstance(experts, CardExperts):
            raise TypeError(f"experts prepared by another implementation: {type(experts).__name__}")
        (gate_up_EGD, of_gate_up), (down_EDI, of_down) = map(_parts, (experts.gate_up_EGD, experts.down_EDI))
        weights = gate_up_EGD, down_EDI, of_gate_up, of_down
        more = experts.biases, experts.gate, self._num_multiprocessors
        return mixture(x_TD, routes.experts_TA, routes.weights_TA, *weights, *more)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        rms_norm(x_TD.contiguous(), weight_D, eps, out_TD)
        return out_TD

    def rope_append(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
    ) -> torch.Tensor:
        q_THN = qkv_TC.new_empty(qkv_TC.shape[0], heads.num_heads, heads.head_dim)
        rope_append(qkv_TC, heads, rotary, batch.slots_T, batch.positions_T, batch.page_table, k_PKSN, v_PKSN, q_THN)
        return q_THN

    def attention(
        self, q_THN: torch.Tensor, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor
    ) -> torch.Tensor:
        out_THN = torch.empty_like(q_THN)
        mixed_TC = self._attend_spans(q_THN, heads, batch, k_PKSN, v_PKSN, out_THN)
        if batch.decode_row < q_THN.shape[0]:
            rows = self._decoding(heads, batch, k_PKSN)
            q_BHN, out_BHN = q_THN[batch.decode_row :], out_THN[batch.decode_row :]
            decode_attention(q_BHN, k_PKSN, v_PKSN, *rows[:3], out_BHN, *rows[3:], heads.window, heads.sinks_H)
        return mixed_TC

    def append_attention(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
        written: Callable[[], None] = no_callback,
    ) -> torch.Tensor:
        first, (num_rows, _) = batch.decode_row, qkv_TC.shape
        out_THN = qkv_TC.new_empty(num_rows, heads.num_heads, heads.head_dim)
        mixed_TC = out_THN.view(num_rows, -1)
        if first:
            q_THN = qkv_TC.new_empty(first, heads.num_heads, heads.head_dim)
            rows = batch.slots_T[:first], batch.positions_T[:first]
            rope_append(qkv_TC[:first], heads, rotary, *rows, batch.page_table, k_PKSN, v_PKSN, q_THN)
            written()
            mixed_TC = self._attend_spans(q_THN, heads, batch, k_PKSN, v_PKSN, out_THN)
        if first < num_rows:
            slots_B, positions_B, table, splits, arrived = self._decoding(heads, batch, k_PKSN)
            where = k_PKSN, v_PKSN, slots_B, positions_B, table
            append_attention(qkv_TC[first:], heads, rotary, *where, out_THN[first:], splits, arrived)
        if not first:
            written()
        return mixed_TC

    def _attend_spans(
        self,
        q_THN: torch.Tensor,
        heads: HeadSpec,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
        out_THN: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the rows of spans into `out_THN`, and return it as `[T, H N]`, or a tensor in its place."""
        tiles_Y4, whole = batch.tiles_Y4, tuple[Span, ...]()
        if heads.is_plain:
            routes = self._routes_of(batch)
            if routes.is_alone:
                return whole_prompt(q_THN, k_PKSN, v_PKSN, batch, routes.whole[0]).reshape(q_THN.shape[0], -1)
            tiles_Y4, whole = routes.tiles_Y4, routes.whole
        for span in whole:
            rows = slice(span.row, span.row + span.length)
            out_THN[rows] = whole_prompt(q_THN, k_PKSN, v_PKSN, batch, span)
        window, sinks_H = heads.window, heads.sinks_H
        if tiles_Y4.shape[0]:
            table = batch.page_table
            prefill_attention(q_THN, k_PKSN, v_PKSN, tiles_Y4, table, out_THN, window=window, sinks_H=sinks_H)
        return out_THN.view(out_THN.shape[0], -1)

    def _decoding(
        self, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
        """Return slots, positions and page table of the rows that decode, splits and counters for them."""
        slots_B, positions_B = batch.slots_T[batch.decode_row :], batch.positions_T[batch.decode_row :]
        longest = batch.page_table.shape[1] * k_PKSN.shape[2]
        longest = min(longest, heads.window or longest)
        splits = num_splits_for(slots_B.shape[0], heads.num_kv_heads, longest, self._num_multiprocessors)
        return slots_B, positions_B, batch.page_table, splits, self._counters(slots_B.device)

    def _routes_of(self, batch: Batch) -> AttentionPlan:
        if self._routes is None or self._routes.batch is not batch:
            self._routes = AttentionPlan.of(batch, self._whole_prompt_tokens)
        return self._routes

    def latent_append(
        self, kv_TC: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch, pages_PKSC: torch.Tensor
    ) -> None:
        latent_append(kv_TC, heads, rotary, batch.slots_T, batch.positions_T, batch.page_table, pages_PKSC)

    def latent_query(
        self, q_THE: torch.Tensor, key_HNL: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch
    ) -> torch.Tensor:
        q_THC = q_THE.new_empty(q_THE.shape[0], heads.num_heads, heads.latent_dim + heads.rope_dim)
        latent_query(q_THE, key_HNL, heads, rotary, batch.positions_T, q_THC)
        return q_THC

    def latent_attention(
        self, q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor
    ) -> torch.Tensor:
        out_THL = q_THC.new_empty(*q_THC.shape[:2], heads.latent_dim)
        if batch.tiles_Y4.shape[0]:
            tiles, first = batch.tiles_Y4, batch.first_position
            latent_prefill(q_THC, heads, pages_PKSC, tiles, batch.page_table, out_THL, first)
        decode = slice(batch.decode_row, None)
        num_decoding = q_THC.shape[0] - batch.decode_row
        if num_decoding:
            longest = batch.page_table.shape[1] * pages_PKSC.shape[2]
            narrow = is_narrow(q_THC.dtype, q_THC.device)
            head_blocks = -(-heads.num_heads // queries_for(heads.num_heads, narrow))
            latent_decode(
                q_THC[decode],
                heads,
                pages_PKSC,
                batch.slots_T[decode],
                batch.positions_T[decode],
                batch.page_table,
                out_THL[decode],
                num_splits_for(num_decoding, head_blocks, longest, self._num_multiprocessors),
                batch.first_position,
            )
        return out_THL


def _prepared(weight: LinearWeight) -> PlainWeight | ScaledWeight:
    """Return the weight as this module prepared it. Raises TypeError if another implementation prepared it."""
    if not isinstance(weight, PlainWeight | ScaledWeight):
        raise TypeError(f"weight prepared by another implementation: {type(weight).__name__}")
    return weight


def _scales(weight: PlainWeight | ScaledWeight) -> Scales | None:
    return weight.scales if isinstance(weight, ScaledWeight) else None


def _parts(stack: torch.Tensor | ScaledStack) -> tuple[torch.Tensor, Scales | None]:
    return (stack, None) if isinstance(stack, torch.Tensor) else (stack.weight, stack.scales)


def _norms_within(x_TD: torch.Tensor) -> bool:
    """Return whether a product of these rows includes the norm before it. It applies the norm's factor last, and in
    float16 a hidden state times the norm's weight may overflow before that."""
    return x_TD.shape[0] <= MAX_ROWS and x_TD.dtype != torch.float16
