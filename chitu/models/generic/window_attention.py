"""Attention of window layers whose last positions lie in the state row of their request (`models/window_state.py`), not
in pages.

The ring has place p % window for position p. A chunk attends to the ring as it was before, and to itself, then replaces
the oldest places: so a chunk may be longer than the window. A decoded token first takes the place of the position that
it does not see any more. Shapes as in `masked_attention.py`; R state rows, W positions of a ring.
"""

from __future__ import annotations

import torch

from chitu.errors import UnsupportedModel
from chitu.ops.interface import Batch, HeadSpec, RotaryTable, Span
from chitu.ops.masked_attention import AttentionKind, attend_rows
from chitu.ops.sparse_index import rotated


def attend_in_rings(
    q_THN: torch.Tensor,
    k_TKN: torch.Tensor,
    v_TKO: torch.Tensor,
    batch: Batch,
    k_RKWN: torch.Tensor,
    v_RKWO: torch.Tensor,
    kind: AttentionKind,
) -> torch.Tensor:
    """Return the attention `[T, H, O]` of all rows, and write their K and V into the rings. Raises UnsupportedModel if
    the layer's window is not that of its config."""
    if kind.window != k_RKWN.shape[2]:
        raise UnsupportedModel(
            f"cache.window_state: a layer of this model has a window of {kind.window} tokens, not {k_RKWN.shape[2]}: "
            "set it to false"
        )
    k_TKN, v_TKO = k_TKN.to(k_RKWN.dtype), v_TKO.to(v_RKWO.dtype)
    out_THO = q_THN.new_empty(*q_THN.shape[:2], v_TKO.shape[-1])
    for span in batch.spans:
        rows = slice(span.row, span.row + span.length)
        chunk = q_THN[rows], k_TKN[rows].transpose(0, 1), v_TKO[rows].transpose(0, 1)
        out_THO[rows] = _chunk(*chunk, span, k_RKWN[span.state_slot], v_RKWO[span.state_slot], kind)
    if batch.decode_slots:
        rows = slice(batch.decode_row, None)
        slots_B = torch.tensor(batch.decode_states, device=q_THN.device)
        positions_B = batch.positions_T[rows]
        out_THO[rows] = _decode(q_THN[rows], k_TKN[rows], v_TKO[rows], slots_B, positions_B, k_RKWN, v_RKWO, kind)
    return out_THO


def heads_in_rings(
    qkv_TC: torch.Tensor,
    heads: HeadSpec,
    rotary: RotaryTable,
    batch: Batch,
    k_RKWN: torch.Tensor,
    v_RKWO: torch.Tensor,
) -> torch.Tensor:
    """Return the attention `[T, H N]` of a layer of our own code without norms on its heads, and write K and V of all
    rows into the rings. `qkv_TC`: as for `Ops.rope_append`."""
    kv, head_dim = heads.num_kv_heads, heads.head_dim
    each_TMN = qkv_TC.view(qkv_TC.shape[0], -1, head_dim)
    q_THN, k_TKN, v_TKN = each_TMN.split_with_sizes((heads.num_heads, kv, kv), dim=1)
    q_THN, k_TKN = (rotated(x, head_dim, rotary, batch.positions_T) for x in (q_THN, k_TKN))
    kind = AttentionKind(head_dim**-0.5, heads.window, sinks_H=heads.sinks_H)
    return attend_in_rings(q_THN, k_TKN, v_TKN, batch, k_RKWN, v_RKWO, kind).flatten(1)


def _chunk(
    q_LHN: torch.Tensor,
    k_KLN: torch.Tensor,
    v_KLO: torch.Tensor,
    span: Span,
    k_KWN: torch.Tensor,
    v_KWO: torch.Tensor,
    kind: AttentionKind,
) -> torch.Tensor:
    window, end = k_KWN.shape[1], span.start + span.length
    columns_M = torch.arange(max(0, span.start - window + 1), end, device=q_LHN.device)
    before_X = columns_M[: len(columns_M) - span.length] % window
    k_KMN, v_KMO = torch.cat((k_KWN[:, before_X], k_KLN), 1), torch.cat((v_KWO[:, before_X], v_KLO), 1)
    positions_L = columns_M[len(columns_M) - span.length :]
    out_BLHO = attend_rows(q_LHN[None], k_KMN[None], v_KMO[None], positions_L[None], columns_M[None], kind)
    kept = min(span.length, window)
    places_X = positions_L[-kept:] % window
    k_KWN[:, places_X], v_KWO[:, places_X] = k_KLN[:, -kept:], v_KLO[:, -kept:]
    return out_BLHO[0]


def _decode(
    q_BHN: torch.Tensor,
    k_BKN: torch.Tensor,
    v_BKO: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    k_RKWN: torch.Tensor,
    v_RKWO: torch.Tensor,
    kind: AttentionKind,
) -> torch.Tensor:
    window, places_B = k_RKWN.shape[2], positions_B % k_RKWN.shape[2]
    k_RKWN[slots_B, :, places_B], v_RKWO[slots_B, :, places_B] = k_BKN, v_BKO
    ages_BW = (positions_B[:, None] - torch.arange(window, device=q_BHN.device)) % window
    columns_BW = positions_B[:, None] - ages_BW
    # Places without a position yet may hold what a former owner left: NaN even, which no mask would stop.
    empty_BW = columns_BW < 0
    k_BKWN, v_BKWO = (x[slots_B].masked_fill(empty_BW[:, None, :, None], 0) for x in (k_RKWN, v_RKWO))
    columns_BW = columns_BW.masked_fill(empty_BW, torch.iinfo(torch.int64).max)
    return attend_rows(q_BHN[:, None], k_BKWN, v_BKWO, positions_B[:, None], columns_BW, kind)[:, 0]
