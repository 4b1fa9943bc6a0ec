"""Sparse latent attention by an index (DeepSeek-V3.2's "lightning indexer", GLM-5): each row attends only to the
positions that score highest. In torch calls: any device, any dtype. Called only by the step thread.

A token has an index key, one row beside its latent in the pages. A row's score of a position is the weighted sum, over
the heads of the index, of what is positive of `q k`. The best `top_k` visible positions are chosen; if no row sees more
positions than that, nothing is chosen and attention is dense.

Positions that are not chosen are masked, not skipped: the result is exact, the work is that of dense attention.

Shapes as in `interface.py`; G heads of the index, I numbers of an index key, M positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chitu.ops.fp8_pages import put_rows, take_pages
from chitu.ops.interface import Batch, LatentHeads, RotaryTable

MAX_SCORES = 1 << 26
"""Most scores of single heads in memory at a time: 256 MiB."""


@dataclass(frozen=True, slots=True)
class ChosenPositions:
    """Positions that the rows of a batch attend to."""

    spans: tuple[torch.Tensor, ...]
    """For each span bool `[L, M]`."""
    decode_BM: torch.Tensor | None
    """For the decoding rows; None if there are none."""


def rotated(x_TGI: torch.Tensor, rope_dim: int, rotary: RotaryTable, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rope_dim` numbers of each head, whose pairs lie half of them apart."""
    cos, sin = rotary.cos[positions_T].unsqueeze(1), rotary.sin[positions_T].unsqueeze(1)
    first, second, rest = x_TGI.float().split_with_sizes((rope_dim // 2, rope_dim // 2, x_TGI.shape[2] - rope_dim), 2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2).to(x_TGI.dtype)


def append_keys(key_TI: torch.Tensor, batch: Batch, pages_PKSI: torch.Tensor) -> None:
    """Write the index keys of all rows into the pages."""
    size = pages_PKSI.shape[2]
    pages_T = batch.page_table[batch.slots_T, batch.positions_T // size]
    put_rows(pages_PKSI, pages_T, batch.positions_T % size, key_TI.unsqueeze(1))


def choose(
    q_TGI: torch.Tensor,
    weights_TG: torch.Tensor,
    batch: Batch,
    pages_PKSI: torch.Tensor,
    top_k: int,
    max_scores: int = MAX_SCORES,
) -> ChosenPositions | None:
    """Return the positions that each row attends to; None if every row sees `top_k` positions at most, so all of them.
    `weights_TG`: float32, with the scale of `q k` in them."""
    ends = [span.start + span.length for span in batch.spans]
    if max([*ends, batch.max_decode_len]) <= top_k:
        return None
    spans = []
    for span, end in zip(batch.spans, ends, strict=True):
        rows = slice(span.row, span.row + span.length)
        keys_MI = _keys(pages_PKSI, batch.page_table[span.slot], end)
        at_once = max(1, max_scores // (q_TGI.shape[1] * end))
        seen_LM = torch.arange(end, device=q_TGI.device) <= batch.positions_T[rows].unsqueeze(1)
        pieces = (torch.split(x, at_once) for x in (q_TGI[rows], weights_TG[rows], seen_LM))
        best = [_best(_scores(q, keys_MI.T, weights), seen, top_k) for q, weights, seen in zip(*pieces, strict=True)]
        spans.append(torch.cat(best))
    decode_BM = None
    if batch.decode_slots:
        table_BP, columns_M = _decode_pages(batch, pages_PKSI)
        keys_BMI = take_pages(pages_PKSI, table_BP, torch.float32).squeeze(2).flatten(1, 2).float()
        seen_BM = columns_M <= batch.positions_T[batch.decode_row :].unsqueeze(1)
        keys_BIM = keys_BMI.masked_fill(~seen_BM.unsqueeze(2), 0).transpose(1, 2)  # may be in pages of others
        scores_BM = _scores(q_TGI[batch.decode_row :], keys_BIM, weights_TG[batch.decode_row :])
        decode_BM = _best(scores_BM, seen_BM, top_k)
    return ChosenPositions(tuple(spans), decode_BM)


def chosen_attention(
    q_THC: torch.Tensor, heads: LatentHeads, batch: Batch, pages_PKSC: torch.Tensor, choice: ChosenPositions
) -> torch.Tensor:
    """Return the attention `[T, H, L]` of every row over the positions that were chosen for it."""
    out_THL = q_THC.new_empty(*q_THC.shape[:2], heads.latent_dim)
    for span, chosen_LM in zip(batch.spans, choice.spans, strict=True):
        rows, end = slice(span.row, span.row + span.length), span.start + span.length
        size = pages_PKSC.shape[2]
        pages_P = batch.page_table[span.slot, : -(-end // size)]
        k_MC = take_pages(pages_PKSC, pages_P, q_THC.dtype).flatten(0, 2)[:end]
        out_THL[rows] = _attend(q_THC[rows].unsqueeze(0), k_MC.unsqueeze(0), chosen_LM.unsqueeze(0), heads)[0]
    if choice.decode_BM is not None:
        table_BP, _ = _decode_pages(batch, pages_PKSC)
        k_BMC = take_pages(pages_PKSC, table_BP, q_THC.dtype).flatten(1, 3)
        k_BMC = k_BMC.masked_fill(~choice.decode_BM.unsqueeze(2), 0)  # a NaN of another sequence survives a mask
        q_BLHC = q_THC[batch.decode_row :].unsqueeze(1)
        out_THL[batch.decode_row :] = _attend(q_BLHC, k_BMC, choice.decode_BM.unsqueeze(1), heads)[:, 0]
    return out_THL


def _keys(pages_PKSI: torch.Tensor, pages_P: torch.Tensor, length: int) -> torch.Tensor:
    size = pages_PKSI.shape[2]
    return take_pages(pages_PKSI, pages_P[: -(-length // size)], torch.float32).flatten(0, 2)[:length].float()


def _decode_pages(batch: Batch, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages `[B, P]` of the decoding rows, as many as the longest needs, and the positions in them."""
    size = pages.shape[2]
    count = -(-batch.max_decode_len // size)
    table_BP = batch.page_table[batch.slots_T[batch.decode_row :], :count]
    return table_BP, torch.arange(count * size, device=table_BP.device)


def _scores(q_TGI: torch.Tensor, keys_IM: torch.Tensor, weights_TG: torch.Tensor) -> torch.Tensor:
    """Return the score `[T, M]` of every position. `keys_IM`: of one sequence, or one for each row."""
    products_TGM = F.relu_(q_TGI.float() @ keys_IM)
    return (weights_TG.unsqueeze(1) @ products_TGM).squeeze(1)


def _best(scores_TM: torch.Tensor, seen_TM: torch.Tensor, top_k: int) -> torch.Tensor:
    scores_TM = scores_TM.masked_fill(~seen_TM, -torch.inf)
    best_TX = scores_TM.topk(min(top_k, scores_TM.shape[1]), dim=1).indices
    return torch.zeros_like(seen_TM).scatter_(1, best_TX, True) & seen_TM


def _attend(q_BLHC: torch.Tensor, k_BMC: torch.Tensor, chosen_BLM: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
    """Return `[B, L, H, latent]`."""
    k_B1MC = k_BMC.unsqueeze(1)
    out_BHLO = F.scaled_dot_product_attention(
        q_BLHC.transpose(1, 2),
        k_B1MC,
        k_B1MC[..., : heads.latent_dim],
        attn_mask=chosen_BLM.unsqueeze(1),
        scale=heads.softmax_scale,
        enable_gqa=True,
    )
    return out_BHLO.transpose(1, 2)
