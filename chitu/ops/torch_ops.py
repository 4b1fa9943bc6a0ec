"""The operations in torch calls: any device, any dtype. Few calls per layer; nothing waits for the device.

Prefill rows attend span by span (`scaled_dot_product_attention`). Decoding rows are gathered, padded to the longest and
computed in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from chitu.ops.fp8_pages import put_rows, take_pages
from chitu.ops.interface import (
    Batch,
    ExpertBiases,
    ExpertWeights,
    HeadSpec,
    LatentHeads,
    LinearWeight,
    Ops,
    RotaryTable,
    Routes,
)
from chitu.ops.kept import Matrix, Weights, dequantised, stack_of
from chitu.ops.masked_attention import AttentionKind, attend
from chitu.ops.routing import Router, gated, route, rows_by_expert, weighted_sum
from chitu.ops.routing_rule import ClampedGate


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight `[out, in]` as in the checkpoint."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


def plain(weight: LinearWeight) -> PlainWeight:
    """Return the weight as this module prepared it. Raises TypeError if another implementation prepared it."""
    if not isinstance(weight, PlainWeight):
        raise TypeError(f"weight prepared by another implementation: {type(weight).__name__}")
    return weight


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Every expert's gate, up and down in one tensor each."""

    gate_up_EGD: torch.Tensor
    """Weights `[E, 2 I, D]`, gate rows first."""
    down_EDI: torch.Tensor
    biases: ExpertBiases | None = None
    gate: ClampedGate | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_up_EGD.shape[0]

    def result(self, expert: int, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the result `[T, D]` of one expert."""
        gate_up_bias = down_bias = None
        if self.biases is not None:
            gate_up_bias = self.biases.gate_up_EG[expert]
            down_bias = self.biases.down_ED[expert] if self.biases.down_ED is not None else None
        gate, up = F.linear(x_TD, self.gate_up_EGD[expert], gate_up_bias).chunk(2, dim=-1)
        return F.linear(gated(gate, up, self.gate), self.down_EDI[expert], down_bias)


def stacked(experts: ExpertWeights) -> StackedExperts:
    """Return the experts as this module prepared them. Raises TypeError if another implementation prepared them."""
    if not isinstance(experts, StackedExperts):
        raise TypeError(f"experts prepared by another implementation: {type(experts).__name__}")
    return experts


class PlainOps(Ops, Protocol):
    """An `Ops` with weights as in the checkpoint."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        return PlainWeight(dequantised(weight), bias)

    def prepare_gate_up(self, weight: Matrix, bias: torch.Tensor | None) -> LinearWeight:
        return PlainWeight(dequantised(weight), bias)

    def route(self, x_TD: torch.Tensor, router: Router) -> Routes:
        return route(x_TD, router)

    def rows_of(self, weight: LinearWeight, rows_T: torch.Tensor) -> torch.Tensor:
        return plain(weight).weight[rows_T]

    def linear_add(self, x_TI: torch.Tensor, weight: LinearWeight, residual_TD: torch.Tensor) -> torch.Tensor:
        return residual_TD.add_(self.linear(x_TI, weight))

    def gate_and_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self.linear(x_TD, weight)

    def prepare_experts(
        self,
        gate_up_EGD: Weights,
        down_EDI: Weights,
        biases: ExpertBiases | None = None,
        gate: ClampedGate | None = None,
    ) -> ExpertWeights:
        return StackedExperts(stack_of(gate_up_EGD), stack_of(down_EDI), biases, gate)


class TorchOps(PlainOps):
    """An `Ops` for any device and dtype."""

    name = "torch"

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        w = plain(weight)
        return F.linear(x_TI, w.weight, w.bias)

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        gate, up = self.linear(x_TD, weight).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def mixture(self, x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
        own, per_row = stacked(experts), routes.experts_TA.shape[1]
        if x_TD.device.type != "cpu":
            return self._mixture_without_a_wait(x_TD, routes, own)
        y_RD = x_TD.new_empty(routes.experts_TA.numel(), x_TD.shape[1])
        for expert, pairs in rows_by_expert(routes, own.num_experts):
            if expert == own.num_experts:
                y_RD[pairs] = 0
                continue
            y_RD[pairs] = own.result(expert, x_TD[pairs // per_row])
        return weighted_sum(y_RD, routes)

    def _mixture_without_a_wait(self, x_TD: torch.Tensor, routes: Routes, own: StackedExperts) -> torch.Tensor:
        """Pass every row through every expert, since only the device knows which are needed: correct but slow."""
        shares_TE = torch.zeros(x_TD.shape[0], own.num_experts + 1, dtype=torch.float32, device=x_TD.device)
        shares_TE.scatter_(1, routes.experts_TA, routes.weights_TA)
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for expert in range(own.num_experts):
            share_T1 = shares_TE[:, expert : expert + 1]
            out_TD.add_(torch.where(share_T1 != 0, own.result(expert, x_TD).float() * share_T1, 0))
        return out_TD.to(x_TD.dtype)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)

    def rope_append(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
    ) -> torch.Tensor:
        num_rows, kv, page_size = qkv_TC.shape[0], heads.num_kv_heads, k_PKSN.shape[2]
        q, k, v = qkv_TC.view(num_rows, -1, heads.head_dim).split_with_sizes((heads.num_heads, kv, kv), dim=1)
        if heads.q_norm_N is not None:
            q = self.rms_norm(q, heads.q_norm_N, heads.eps)
        if heads.k_norm_N is not None:
            k = self.rms_norm(k, heads.k_norm_N, heads.eps)
        positions = batch.positions_T
        cos, sin = rotary.cos[positions].unsqueeze(1), rotary.sin[positions].unsqueeze(1)
        q, k = _rotate(q, cos, sin).to(q.dtype), _rotate(k, cos, sin)
        pages, offsets = batch.page_table[batch.slots_T, positions // page_size], positions % page_size
        put_rows(k_PKSN, pages, offsets, k)
        put_rows(v_PKSN, pages, offsets, v)
        return q

    def attention(
        self, q_THN: torch.Tensor, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor
    ) -> torch.Tensor:
        scale = heads.head_dim**-0.5
        if heads.is_plain:
            return _attention(q_THN, batch, k_PKSN, v_PKSN, scale).view(q_THN.shape[0], -1)
        kind = AttentionKind(scale, heads.window, sinks_H=heads.sinks_H)
        return attend(q_THN, batch, k_PKSN, v_PKSN, kind, v_PKSN.shape[-1]).flatten(1)

    def latent_append(
        self, kv_TC: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch, pages_PKSC: torch.Tensor
    ) -> None:
        latent_TL, key_TR = kv_TC.split_with_sizes((heads.latent_dim, heads.rope_dim), dim=1)
        cos, sin, page_size = rotary.cos[batch.positions_T], rotary.sin[batch.positions_T], pages_PKSC.shape[2]
        rows_TC = torch.cat((self.rms_norm(latent_TL, heads.norm_L, heads.eps), _rotate(key_TR, cos, sin)), dim=1)
        pages = batch.page_table[batch.slots_T, batch.positions_T // page_size]
        put_rows(pages_PKSC, pages, batch.positions_T % page_size, rows_TC.unsqueeze(1))

    def latent_query(
        self, q_THE: torch.Tensor, key_HNL: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch
    ) -> torch.Tensor:
        q_THN, q_THR = q_THE.split_with_sizes((key_HNL.shape[1], heads.rope_dim), dim=2)
        cos, sin = rotary.cos[batch.positions_T].unsqueeze(1), rotary.sin[batch.positions_T].unsqueeze(1)
        q_THL = torch.bmm(q_THN.transpose(0, 1), key_HNL).transpose(0, 1)
        return torch.cat((q_THL, _rotate(q_THR, cos, sin).to(q_THR.dtype)), dim=2)

    def latent_attention(
        self, q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor
    ) -> torch.Tensor:
        return _attention(q_THC, batch, pages_PKSC, pages_PKSC[..., : heads.latent_dim], heads.softmax_scale)


def _attention(
    q_THN: torch.Tensor, batch: Batch, k_PKSN: torch.Tensor, v_PKSO: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return `[T, H, O]`. Keys and values may differ in width."""
    out_THO = q_THN.new_empty(*q_THN.shape[:2], v_PKSO.shape[-1])
    for span in batch.spans:
        rows = slice(span.row, span.row + span.length)
        end = span.start + span.length
        k_KLN, v_KLO = (_gather(x, batch.page_table[span.slot], end, q_THN.dtype) for x in (k_PKSN, v_PKSO))
        out_THO[rows] = _causal(q_THN[rows], k_KLN, v_KLO, span.start, scale, batch.first_position)
    if batch.decode_slots:
        out_THO[batch.decode_row :] = _decode(q_THN[batch.decode_row :], batch, k_PKSN, v_PKSO, scale)
    return out_THO


def _decode(
    q_BHN: torch.Tensor, batch: Batch, k_PKSN: torch.Tensor, v_PKSO: torch.Tensor, scale: float
) -> torch.Tensor:
    page_size, length = k_PKSN.shape[2], batch.max_decode_len
    num_pages = (length + page_size - 1) // page_size
    pages_BP = batch.page_table[batch.slots_T[batch.decode_row :], :num_pages]
    k, v = (take_pages(x, pages_BP, q_BHN.dtype).transpose(1, 2).flatten(2, 3) for x in (k_PKSN, v_PKSO))
    columns = torch.arange(num_pages * page_size, device=q_BHN.device)
    positions_B1 = batch.positions_T[batch.decode_row :].unsqueeze(1)
    visible = columns <= positions_B1
    if batch.first_position:
        visible &= (columns >= batch.first_position) | (columns == positions_B1)
    # Columns past a sequence's end may be in pages of other sequences; a NaN there would survive the mask.
    hidden = ~visible[:, None, :, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    q = q_BHN.view(q_BHN.shape[0], k.shape[1], -1, q_BHN.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None], scale=scale).flatten(1, 2)


def _rotate(x_THN: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return rotated rows in float32, so that values in pages are rounded only once."""
    first, second = x_THN.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _gather(x_PKSN: torch.Tensor, pages: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first `length` tokens of a page list as `[K, length, N]`."""
    page_size = x_PKSN.shape[2]
    taken_PKSN = take_pages(x_PKSN, pages[: (length + page_size - 1) // page_size], dtype)
    return taken_PKSN.transpose(0, 1).flatten(1, 2)[:, :length]


def _causal(
    q_LHN: torch.Tensor, k_KMN: torch.Tensor, v_KMO: torch.Tensor, start: int, scale: float, first: int = 0
) -> torch.Tensor:
    """Return the attention `[L, H, O]` of rows at positions start, start + 1, ... over the keys first .. M - 1."""
    q_HLN, length = q_LHN.transpose(0, 1), q_LHN.shape[0]
    mask = None
    if first or (start and length > 1):
        mask = torch.ones(length, start + length, dtype=torch.bool, device=q_LHN.device).tril_(start)
    if mask is not None and first:
        mask[:, :first] = False
        mask.diagonal(start).fill_(True)
    out = F.scaled_dot_product_attention(
        q_HLN.unsqueeze(0),
        k_KMN.unsqueeze(0),
        v_KMO.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and length > 1,
        scale=scale,
        enable_gqa=q_HLN.shape[0] != k_KMN.shape[0],
    )
    return out[0].transpose(0, 1)
