"""Reference implementation of every operation in plain torch, written for clarity, in float32 throughout.

Faster implementations are tested against it. It is slow: it goes row by row if that is clearest.
"""

from __future__ import annotations

import torch

from chitu.ops.fp8_pages import is_fp8, quantised, scales_of
from chitu.ops.interface import Batch, ExpertWeights, HeadSpec, LatentHeads, LinearWeight, RotaryTable, Routes
from chitu.ops.torch_ops import PlainOps, plain, stacked


def rotate(x_THN: torch.Tensor, cos_TN: torch.Tensor, sin_TN: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding with the first and second half of a head as the two coordinates."""
    first, second = x_THN.chunk(2, dim=-1)
    cos, sin = cos_TN.unsqueeze(1), sin_TN.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def put(x_PKSN: torch.Tensor, page: int, offset: int, row_KN: torch.Tensor) -> None:
    """Write one token's row of every head. With e4m3 pages write its quantised values, and its scales to their
    place."""
    if not is_fp8(x_PKSN):
        x_PKSN[page, :, offset] = row_KN.to(x_PKSN.dtype)
        return
    values_KN, scale_K = quantised(row_KN)
    for head in range(row_KN.shape[0]):
        x_PKSN.view(torch.uint8)[page, head, offset] = values_KN[head].view(torch.uint8)
        scales_of(x_PKSN)[page, head, offset] = scale_K[head]


def take(x_PKSN: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return these pages `[., K, S, N]` in float32, every row times its scale."""
    if not is_fp8(x_PKSN):
        return x_PKSN[pages].float()
    return torch.stack([x_PKSN[page].float() * scales_of(x_PKSN)[page].unsqueeze(-1) for page in pages.tolist()])


class ReferenceOps(PlainOps):
    """Implements `Ops`."""

    name = "reference"

    def linear(self, x_TI: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        w = plain(weight)
        y = x_TI.float() @ w.weight.float().T
        return (y if w.bias is None else y + w.bias.float()).to(x_TI.dtype)

    def gate_up(self, x_TD: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        gate, up = self.linear(x_TD, weight).float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(x_TD.dtype)

    def mixture(self, x_TD: torch.Tensor, routes: Routes, experts: ExpertWeights) -> torch.Tensor:
        own = stacked(experts)
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
        for row in range(x_TD.shape[0]):
            chosen = zip(routes.experts_TA[row].tolist(), routes.weights_TA[row].tolist(), strict=True)
            for expert, weight in chosen:
                both = own.gate_up_EGD[expert].float() @ x_TD[row].float()
                if own.biases is not None:
                    both += own.biases.gate_up_EG[expert].float()
                gate, up = both.chunk(2)
                alpha = 1.0
                if own.gate is not None:
                    alpha, limit = own.gate
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                result = own.down_EDI[expert].float() @ (gate * torch.sigmoid(alpha * gate) * up)
                if own.biases is not None and own.biases.down_ED is not None:
                    result += own.biases.down_ED[expert].float()
                out_TD[row] += weight * result
        return out_TD.to(x_TD.dtype)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_TD.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return weight_D * x.to(x_TD.dtype)

    def rope_append(
        self,
        qkv_TC: torch.Tensor,
        heads: HeadSpec,
        rotary: RotaryTable,
        batch: Batch,
        k_PKSN: torch.Tensor,
        v_PKSN: torch.Tensor,
    ) -> torch.Tensor:
        num_rows = qkv_TC.shape[0]
        kv = heads.num_kv_heads
        q, k, v = qkv_TC.view(num_rows, -1, heads.head_dim).split_with_sizes((heads.num_heads, kv, kv), dim=1)
        if heads.q_norm_N is not None:
            q = self.rms_norm(q, heads.q_norm_N, heads.eps)
        if heads.k_norm_N is not None:
            k = self.rms_norm(k, heads.k_norm_N, heads.eps)
        cos, sin = rotary.cos[batch.positions_T], rotary.sin[batch.positions_T]
        q, k = rotate(q.float(), cos, sin).to(q.dtype), rotate(k.float(), cos, sin)
        page_size = k_PKSN.shape[2]
        for row in range(num_rows):
            slot, position = int(batch.slots_T[row]), int(batch.positions_T[row])
            page = int(batch.page_table[slot, position // page_size])
            put(k_PKSN, page, position % page_size, k[row])
            put(v_PKSN, page, position % page_size, v[row])
        return q

    def attention(
        self, q_THN: torch.Tensor, heads: HeadSpec, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor
    ) -> torch.Tensor:
        num_rows, page_size = q_THN.shape[0], k_PKSN.shape[2]
        group = heads.num_heads // heads.num_kv_heads
        out = torch.empty_like(q_THN)
        for row in range(num_rows):
            slot, length = int(batch.slots_T[row]), int(batch.positions_T[row]) + 1
            pages = batch.page_table[slot, : (length + page_size - 1) // page_size]
            k_KLN = take(k_PKSN, pages).transpose(0, 1).flatten(1, 2)[:, :length]
            v_KLN = take(v_PKSN, pages).transpose(0, 1).flatten(1, 2)[:, :length]
            q_KGN = q_THN[row].float().view(heads.num_kv_heads, group, heads.head_dim)
            scores = (q_KGN @ k_KLN.transpose(1, 2)) * heads.head_dim**-0.5
            if heads.window is not None:
                scores[..., : max(0, length - heads.window)] = -torch.inf
            sinks = torch.full((heads.num_heads,), -torch.inf) if heads.sinks_H is None else heads.sinks_H
            scores = torch.cat((scores, sinks.view(heads.num_kv_heads, group, 1)), dim=2)
            out[row] = (scores.softmax(-1)[..., :-1] @ v_KLN).view(heads.num_heads, heads.head_dim).to(out.dtype)
        return out.view(num_rows, -1)

    def latent_append(
        self, kv_TC: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch, pages_PKSC: torch.Tensor
    ) -> None:
        page_size = pages_PKSC.shape[2]
        cos, sin = rotary.cos[batch.positions_T], rotary.sin[batch.positions_T]
        latent = self.rms_norm(kv_TC[:, : heads.latent_dim], heads.norm_L, heads.eps)
        key = rotate(kv_TC[:, None, heads.latent_dim :].float(), cos, sin)[:, 0]
        for row in range(kv_TC.shape[0]):
            slot, position = int(batch.slots_T[row]), int(batch.positions_T[row])
            page = int(batch.page_table[slot, position // page_size])
            put(pages_PKSC, page, position % page_size, torch.cat((latent[row], key[row])).unsqueeze(0))

    def latent_query(
        self, q_THE: torch.Tensor, key_HNL: torch.Tensor, heads: LatentHeads, rotary: RotaryTable, batch: Batch
    ) -> torch.Tensor:
        nope = key_HNL.shape[1]
        absorbed = torch.einsum("thn,hnl->thl", q_THE[:, :, :nope].float(), key_HNL.float())
        rotated = rotate(q_THE[:, :, nope:].float(), rotary.cos[batch.positions_T], rotary.sin[batch.positions_T])
        return torch.cat((absorbed, rotated), dim=2).to(q_THE.dtype)

    def latent_attention(
        self, q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor
    ) -> torch.Tensor:
        page_size = pages_PKSC.shape[2]
        out_THL = q_THC.new_empty(*q_THC.shape[:2], heads.latent_dim)
        for row in range(q_THC.shape[0]):
            slot, length = int(batch.slots_T[row]), int(batch.positions_T[row]) + 1
            pages = batch.page_table[slot, : (length + page_size - 1) // page_size]
            rows_MC = take(pages_PKSC, pages)[:, 0].flatten(0, 1)[:length]
            rows_MC = rows_MC[min(batch.first_position, length - 1) :]
            shares_HM = (q_THC[row].float() @ rows_MC.T * heads.softmax_scale).softmax(-1)
            out_THL[row] = (shares_HM @ rows_MC[:, : heads.latent_dim]).to(out_THL.dtype)
        return out_THL
