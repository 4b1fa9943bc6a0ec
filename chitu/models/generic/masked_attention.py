"""Attention with masks: what a layer of a generic model adds to causal attention, and the arithmetic of some rows over
some keys. Pure.

Shapes as in `ops/interface.py`, and B sequences with L rows each, M keys, O numbers of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What a layer adds to causal attention."""

    scale: float
    window: int | None = None
    """Last positions that a row sees, its own included; None for all."""
    chunk: int | None = None
    """A row sees the positions of its own run of so many only; None for all."""
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    """Logits that take weight from the positions and give nothing."""


def attend_rows(
    q_BLHN: torch.Tensor,
    k_BKMN: torch.Tensor,
    v_BKMO: torch.Tensor,
    positions_BL: torch.Tensor,
    columns_BM: torch.Tensor,
    kind: AttentionKind,
) -> torch.Tensor:
    """Return `[B, L, H, O]` of rows at these positions over keys at these."""
    q_BHLN, rows_BL1, columns_B1M = q_BLHN.transpose(1, 2), positions_BL.unsqueeze(2), columns_BM.unsqueeze(1)
    if k_BKMN.shape[-1] != q_BHLN.shape[-1]:
        k_BKMN = k_BKMN[..., : q_BHLN.shape[-1]]
    seen_BLM = columns_B1M <= rows_BL1
    if kind.window is not None:
        seen_BLM = seen_BLM & (columns_B1M > rows_BL1 - kind.window)
    if kind.chunk is not None:
        seen_BLM = seen_BLM & (columns_B1M // kind.chunk == rows_BL1 // kind.chunk)
    seen_B1LM, is_grouped = seen_BLM.unsqueeze(1), q_BHLN.shape[1] != k_BKMN.shape[1]
    if kind.softcap is None and kind.sinks_H is None:
        out_BHLO = F.scaled_dot_product_attention(
            q_BHLN, k_BKMN, v_BKMO, attn_mask=seen_B1LM, scale=kind.scale, enable_gqa=is_grouped
        )
        return out_BHLO.transpose(1, 2)
    groups = q_BHLN.shape[1] // k_BKMN.shape[1]
    scores_BHLM = (q_BHLN @ k_BKMN.repeat_interleave(groups, 1).transpose(2, 3)).float() * kind.scale
    if kind.softcap is not None:
        scores_BHLM = kind.softcap * torch.tanh(scores_BHLM / kind.softcap)
    scores_BHLM = scores_BHLM.masked_fill(~seen_B1LM, -torch.inf)
    if kind.sinks_H is not None:
        sinks_BHL1 = kind.sinks_H.float().view(1, -1, 1, 1).expand(*scores_BHLM.shape[:3], 1)
        weights_BHLM = torch.cat((scores_BHLM, sinks_BHL1), -1).softmax(-1)[..., :-1]
    else:
        weights_BHLM = scores_BHLM.softmax(-1)
    return (weights_BHLM.to(v_BKMO.dtype) @ v_BKMO.repeat_interleave(groups, 1)).transpose(1, 2)
