"""The real FlashInfer, if it is installed: by its trial, and by spans of an odd step against torch in float32."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from gpu_errors import relative_error

from chitu.ops.flashinfer_prefill import PrefillShape, open_flashinfer
from chitu.ops.interface import Batch, HeadSpec, Span, tiles_of
from chitu.ops.torch_ops import TorchOps

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import NO_WHOLE_PROMPTS

PAGE = 16
LIMIT_S = 150.0


@pytest.mark.timeout(240)  # it may have to build its kernels first
@pytest.mark.parametrize("heads", [(16, 8, 128), (28, 4, 128)], ids=str)
def test_spans_of_any_length_behind_any_prefix(card, heads):
    if card.is_twin or importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed, or this is the twin (test_flashinfer_prefill.py has its own)")
    num_heads, kv_heads, dim = heads
    shape = PrefillShape(num_heads, kv_heads, dim, PAGE, card.dtype, card.dtype)
    flashinfer = open_flashinfer("flashinfer", shape, card.device, LIMIT_S)
    ops, spec = TritonOps(card.num_multiprocessors, NO_WHOLE_PROMPTS, flashinfer), HeadSpec(*heads, 1e-6)
    source = random.Random(1)
    for _ in range(4):  # more steps than wrappers
        lengths = [source.choice([1, 15, 16, 127, 128, 129, 700, 2100]) for _ in range(5)] + [300]
        starts = [source.choice([0, 0, 1, 16, 500]) for _ in lengths]
        pages_each = -(-max(a + b for a, b in zip(lengths, starts, strict=True)) // PAGE)
        num_pages = len(lengths) * pages_each
        spans, row = [], 0
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True)):
            spans.append(Span(row, length, slot, start))
            row += length
        batch = Batch(
            slots_T=torch.tensor([s.slot for s in spans for _ in range(s.length)], device=card.device),
            positions_T=torch.tensor([s.start + i for s in spans for i in range(s.length)], device=card.device),
            page_table=torch.randperm(num_pages, device=card.device).view(len(lengths), pages_each),
            spans=tuple(spans),
            spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans]),
            tiles_Y4=torch.tensor(tiles_of(spans), device=card.device),
            decode_row=row,
            decode_slots=(),
            max_decode_len=0,
        )
        k, v = torch.randn(2, num_pages, kv_heads, PAGE, dim, device=card.device).to(card.dtype)
        q = torch.randn(row, num_heads, dim, device=card.device).to(card.dtype)
        expected = TorchOps().attention(q.float(), spec, batch, k.float(), v.float())
        assert relative_error(ops.attention(q, spec, batch, k, v), expected) < 0.005
        assert relative_error(TritonOps(card.num_multiprocessors).attention(q, spec, batch, k, v), expected) < 0.005
