"""The checksum of KV pages (`kv_cache/checksum.py`) in one launch, whatever the number of layers and pages."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WORDS_AT_ONCE = 512


@triton.jit(do_not_specialize=["num_pages", "num_heads_most"])
def _page_sums(
    regions_ptr, salts_ptr, low_ptr, high_ptr, pages_ptr, out_ptr, num_pages, num_heads_most, BLOCK: tl.constexpr
):
    """Program (page, region). `regions`: address, bytes of a page, heads, words of a head; `salts`: of its heads."""
    page = tl.load(pages_ptr + tl.program_id(0))
    region = tl.program_id(1)
    address = tl.load(regions_ptr + region * 4) + page * tl.load(regions_ptr + region * 4 + 1)
    num_heads = tl.load(regions_ptr + region * 4 + 2)
    num_words = tl.load(regions_ptr + region * 4 + 3)
    word_ptr = address.to(tl.pointer_type(tl.int64))
    total = tl.zeros([BLOCK], tl.int64)
    for head in range(num_heads):
        part = tl.zeros([BLOCK], tl.int64)
        for start in range(0, num_words, BLOCK):
            w = start + tl.arange(0, BLOCK)
            is_word = w < num_words
            word = tl.load(word_ptr + head * num_words + w, mask=is_word, other=0)
            low = tl.load(low_ptr + w, mask=is_word, other=0)
            high = tl.load(high_ptr + w, mask=is_word, other=0)
            part += word * low + (word >> 32) * high
        total += part * tl.load(salts_ptr + region * num_heads_most + head)
    tl.store(out_ptr + region * num_pages + tl.program_id(0), tl.sum(total, 0))


def page_sums(
    regions_R4: torch.Tensor, salts_RH: torch.Tensor, low_W: torch.Tensor, high_W: torch.Tensor, pages_N: torch.Tensor
) -> torch.Tensor:
    """Return the sums of these pages over all regions, int64 `[N]`. All tensors are int64 on the device; a region is an
    address, bytes of a page, heads, and words of a head, the salts of missing heads are not read."""
    num_pages, num_regions = len(pages_N), len(regions_R4)
    out_RN = torch.empty(num_regions, num_pages, dtype=torch.int64, device=pages_N.device)
    kernel: Any = _page_sums[(num_pages, num_regions)]
    kernel(
        regions_R4,
        salts_RH,
        low_W,
        high_W,
        pages_N,
        out_RN,
        num_pages,
        salts_RH.shape[1],
        BLOCK=WORDS_AT_ONCE,
        num_warps=4,
    )
    return out_RN.sum(0)
