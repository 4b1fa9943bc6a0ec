"""Attention of whole prompts by the device's own library: gather the pages, then one square, causal product.

A long prompt that begins at position 0 is what libraries are fastest at: on an H100 cuDNN reached 0.78 of the matrix
product's rate at 8192 tokens, paged kernels of FlashInfer 0.40 to 0.67. Gathering costs a copy of K and V. Chunks
behind a prefix are not square and stay with the paged kernel. So do recorded steps, which are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chitu.ops.interface import Batch, Span, tiles_of

WHOLE_PROMPT_TOKENS = 1024
"""From so many on. Where the paged kernel is as fast was not measured."""
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In this order; which of them takes a shape and a dtype torch knows."""


def divide(spans: Sequence[Span], whole_prompt_tokens: int) -> tuple[list[Span], list[Span]]:
    """Those for `whole_prompt`, and the others."""
    whole = [span for span in spans if span.start == 0 and span.length >= whole_prompt_tokens]
    return whole, [span for span in spans if span not in whole]


def tiles_on(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """`Batch.tiles_Y4` of these spans alone."""
    return torch.tensor(tiles_of(spans), dtype=torch.int64).view(-1, 4).to(device, non_blocking=True)


def whole_prompt(
    q_THN: torch.Tensor,
    k_PKSN: torch.Tensor,
    v_PKSN: torch.Tensor,
    batch: Batch,
    span: Span,
    out_THN: torch.Tensor,
) -> None:
    """Rows of a span that begins at position 0 over the same rows' keys; into its rows of `out`."""
    rows = slice(span.row, span.row + span.length)
    pages = batch.page_table[span.slot, : -(-span.length // k_PKSN.shape[2])]
    k_KLN, v_KLN = (x[pages].transpose(0, 1).flatten(1, 2)[:, : span.length] for x in (k_PKSN, v_PKSN))
    with sdpa_kernel(BACKENDS, set_priority=True):
        mixed_HLN = F.scaled_dot_product_attention(
            q_THN[rows].transpose(0, 1).unsqueeze(0),
            k_KLN.to(q_THN.dtype).unsqueeze(0),
            v_KLN.to(q_THN.dtype).unsqueeze(0),
            is_causal=True,
            enable_gqa=q_THN.shape[1] != k_PKSN.shape[1],
        )[0]
    out_THN[rows] = mixed_HLN.transpose(0, 1)
