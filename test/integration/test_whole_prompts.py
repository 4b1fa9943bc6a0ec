"""Which spans go to the device's library, and that the rows come out as those of the paged kernel would."""

from __future__ import annotations

import pytest
import torch
from ops_batch import NUM_PAGES, PAGE_SIZE, random_batch

from chitu.ops.interface import HeadSpec, Span
from chitu.ops.reference import ReferenceOps

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import divide


def test_only_long_spans_at_the_beginning_of_a_sequence():
    spans = [Span(0, 50, 3, 0), Span(50, 49, 1, 0), Span(99, 80, 0, 16), Span(179, 70, 2, 0)]
    whole, rest = divide(spans, 50)
    assert whole == [spans[0], spans[3]] and rest == [spans[1], spans[2]]


@pytest.mark.parametrize("seed", [2, 16, 29])
def test_a_mix_of_whole_prompts_chunks_and_decodes_equals_the_reference(seed):
    batch, spec = random_batch(seed), HeadSpec(4, 2, 32, 1e-6)
    assert all(divide(batch.spans, 13)) and batch.decode_slots, "the case is a mix of all three"
    torch.manual_seed(seed)
    k, v = torch.randn(2, NUM_PAGES, 2, PAGE_SIZE, 32)
    q = torch.randn(len(batch.slots_T), 4, 32)
    found = TritonOps(2, whole_prompt_tokens=13).attention(q, spec, batch, k, v)
    torch.testing.assert_close(found, ReferenceOps().attention(q, spec, batch, k, v), rtol=1e-5, atol=1e-5)
