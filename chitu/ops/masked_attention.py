"""Attention with masks, in torch calls: what a layer adds to causal attention, and the arithmetic of some rows over
some keys, or of a batch over its pages. Windows are masks over full pages, of which only those are read that a row can
see. Nothing of another sequence's page is used: it may hold NaN, which no mask would stop. Pure.

Shapes as in `ops/interface.py`, and B sequences with L rows each, M keys, O numbers of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chitu.ops.fp8_pages import take_pages
from chitu.ops.interface import Batch


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
    ends_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[B, L, H, O]` of rows at these positions over keys at these. `ends_BL`: last positions that rows see, if
    these are not their own."""
    q_BHLN, rows_BL1, columns_B1M = q_BLHN.transpose(1, 2), positions_BL.unsqueeze(2), columns_BM.unsqueeze(1)
    if k_BKMN.shape[-1] != q_BHLN.shape[-1]:
        k_BKMN = k_BKMN[..., : q_BHLN.shape[-1]]
    seen_BLM = columns_B1M <= (rows_BL1 if ends_BL is None else ends_BL.unsqueeze(2))
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


def attend(
    q_THN: torch.Tensor, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor, kind: AttentionKind, width: int
) -> torch.Tensor:
    """Return the attention `[T, H, O]` of all rows over the pages of their slots. `width`: O."""
    out_THO = q_THN.new_empty(*q_THN.shape[:2], width)
    size, ends_T = k_PKSN.shape[2], batch.images.ends_T if batch.images is not None else None
    for span in batch.spans:
        rows, end = slice(span.row, span.row + span.length), span.start + span.length
        first = _first_seen(span.start, kind) // size
        pages_P = batch.page_table[span.slot, first : -(-end // size)]
        k_KMN, v_KMO = (
            take_pages(x, pages_P, q_THN.dtype).transpose(0, 1).flatten(1, 2)[:, : end - first * size]
            for x in (k_PKSN, v_PKSN)
        )
        columns_M = torch.arange(first * size, end, device=q_THN.device)
        out_THO[rows] = attend_rows(
            q_THN[rows].unsqueeze(0),
            k_KMN.unsqueeze(0),
            v_KMO[..., :width].unsqueeze(0),
            batch.positions_T[rows].unsqueeze(0),
            columns_M.unsqueeze(0),
            kind,
            None if ends_T is None else ends_T[rows].unsqueeze(0),
        )[0]
    if batch.decode_slots:
        rows = slice(batch.decode_row, None)
        out_THO[rows] = _decode(q_THN[rows], batch, k_PKSN, v_PKSN, kind, width)
    return out_THO


def _first_seen(position: int, kind: AttentionKind) -> int:
    """Return the first position that a row at `position` sees."""
    first = 0
    if kind.window is not None:
        first = max(first, position - kind.window + 1)
    if kind.chunk is not None:
        first = max(first, position // kind.chunk * kind.chunk)
    return first


def _decode(
    q_BHN: torch.Tensor, batch: Batch, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor, kind: AttentionKind, width: int
) -> torch.Tensor:
    size, table_BP = k_PKSN.shape[2], batch.page_table[batch.slots_T[batch.decode_row :]]
    positions_B = batch.positions_T[batch.decode_row :]
    count, reach = -(-batch.max_decode_len // size), min(kind.window or kind.chunk or 0, kind.chunk or kind.window or 0)
    if reach and reach // size + 2 < count:  # only the pages that a window or chunk can touch, by sequence
        count = reach // size + 2
        last_B = positions_B // size
        columns_BP = (last_B - count + 1).clamp_(min=0).unsqueeze(1) + torch.arange(count, device=q_BHN.device)
        table_BP = table_BP.gather(1, columns_BP.clamp(max=table_BP.shape[1] - 1))
        starts_BP = columns_BP * size
    else:
        table_BP = table_BP[:, :count]
        starts_BP = (torch.arange(count, device=q_BHN.device) * size).unsqueeze(0)
    columns_BM = (starts_BP.unsqueeze(2) + torch.arange(size, device=q_BHN.device)).flatten(1)
    k_BKMN, v_BKMO = (take_pages(x, table_BP, q_BHN.dtype).transpose(1, 2).flatten(2, 3) for x in (k_PKSN, v_PKSN))
    # Columns past a sequence's end may be in pages of other sequences.
    foreign_BKMN = (columns_BM > positions_B.unsqueeze(1))[:, None, :, None]
    k_BKMN, v_BKMO = k_BKMN.masked_fill(foreign_BKMN, 0), v_BKMO[..., :width].masked_fill(foreign_BKMN, 0)
    return attend_rows(q_BHN.unsqueeze(1), k_BKMN, v_BKMO, positions_B.unsqueeze(1), columns_BM, kind)[:, 0]
