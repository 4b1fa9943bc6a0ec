"""Attention of whole prompts by the device's own library: gather the pages, then one square, causal product.

Libraries are fastest for a long prompt that begins at position 0: on an H100 cuDNN reached 0.78 of the matrix product's
rate at 8192 tokens, published paged kernels 0.40 to 0.67. Gathering costs a copy of K and V. Chunks behind a prefix
are not square and go to a paged kernel, as do mixed steps and recorded steps, which are short.

cuDNN builds a plan for every new length, on the calling thread (42 to 400 ms in published measurements), and caches it
for that thread. So a prompt is padded to one of few lengths, `padded_length`, and the warm-up runs each of them
(`engine/executor.py`). Causal rows do not attend to later rows, so padding changes nothing. Its K and V are zeros.

`AttentionPlan` is that choice, made once a step and not once a layer. Called by `TritonOps` on the step thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chitu.ops.interface import Batch, Span, tiles_of
from chitu.ops.kernels.gather import gather_pages

WHOLE_PROMPT_TOKENS = 1024
"""Length of the shortest whole prompt. The length at which the paged kernel is as fast was not measured."""
NO_WHOLE_PROMPTS = sys.maxsize
PAD_TOKENS = 512
PAD_SHARE = 8
"""Longer prompts are padded by up to an eighth of their length, so there are eight lengths from n to 2 n."""
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Backends in order of preference; torch uses the first that supports the shape and dtype."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention kernels of a batch's spans. Holds the batch, so that no other batch can be taken for it."""

    batch: Batch
    whole: tuple[Span, ...]
    """Spans that go to `whole_prompt`, one by one."""
    tiles_Y4: torch.Tensor
    """Tiles of the other spans, as `Batch.tiles_Y4`."""
    is_alone: bool
    """Whether the batch is one whole prompt, without other rows."""

    @classmethod
    def of(cls, batch: Batch, whole_prompt_tokens: int) -> AttentionPlan:
        whole, rest = divide(batch.spans, whole_prompt_tokens)
        tiles_Y4 = tiles_on(rest, batch.tiles_Y4.device) if whole else batch.tiles_Y4
        is_alone = len(whole) == 1 and whole[0].length == batch.slots_T.shape[0]
        return cls(batch, tuple(whole), tiles_Y4, is_alone)


def divide(spans: Sequence[Span], whole_prompt_tokens: int) -> tuple[list[Span], list[Span]]:
    """Divide spans into those for `whole_prompt` and the rest."""
    whole = [span for span in spans if span.start == 0 and span.length >= whole_prompt_tokens]
    return whole, [span for span in spans if span.start or span.length < whole_prompt_tokens]


def padded_length(num_tokens: int) -> int:
    """Return the next multiple of `PAD_TOKENS`, or of an eighth of the power of two below if that is more."""
    unit = max(PAD_TOKENS, (1 << (num_tokens - 1).bit_length()) // 2 // PAD_SHARE)
    return -(-num_tokens // unit) * unit


def padded_lengths(first: int, last: int) -> list[int]:
    """Return every `padded_length` of prompts of `first` to `last` tokens, ascending."""
    found: list[int] = []
    while first <= last:
        found.append(padded_length(first))
        first = found[-1] + 1
    return found


def tiles_on(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """Return `Batch.tiles_Y4` of only these spans."""
    tiles = torch.tensor(tiles_of(spans), dtype=torch.int64, pin_memory=device.type == "cuda")
    return tiles.view(-1, 4).to(device, non_blocking=True)


def whole_prompt(
    q_THN: torch.Tensor, k_PKSN: torch.Tensor, v_PKSN: torch.Tensor, batch: Batch, span: Span
) -> torch.Tensor:
    """Return the attention `[length, H, N]` of a span that begins at position 0, over its own keys."""
    pages = batch.page_table[span.slot, : -(-span.length // k_PKSN.shape[2])]
    num_rows = padded_length(span.length)
    k_KLN, v_KLN = gather_pages(k_PKSN, v_PKSN, pages, span.length, num_rows, q_THN.dtype)
    q_LHN = q_THN[span.row : span.row + span.length]
    if num_rows > span.length:
        q_LHN = F.pad(q_LHN, (0, 0, 0, 0, 0, num_rows - span.length))
    with sdpa_kernel(BACKENDS, set_priority=True):
        mixed_HLN = F.scaled_dot_product_attention(
            q_LHN.transpose(0, 1).unsqueeze(0),
            k_KLN.unsqueeze(0),
            v_KLN.unsqueeze(0),
            is_causal=True,
            enable_gqa=q_THN.shape[1] != k_PKSN.shape[1],
        )[0]
    return mixed_HLN.transpose(0, 1)[: span.length]
