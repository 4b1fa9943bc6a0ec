"""Which spans go to the device's library, and that the resulting rows equal those of the paged kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ops_batch import NUM_PAGES, PAGE_SIZE, random_batch
from support.reference_ops import ReferenceOps

from chitu.ops.interface import Batch, HeadSpec, Span, tiles_of
from chitu.ops.torch_ops import TorchOps

pytest.importorskip("triton", reason="triton is in the dev extra")

from chitu.ops.triton_ops import TritonOps
from chitu.ops.whole_prompts import PAD_TOKENS, divide, padded_length, padded_lengths

pytestmark = pytest.mark.engine


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


def prompts_over_nan(lengths: list[int], starts: list[int], dim: int) -> tuple[Batch, torch.Tensor]:
    """Return spans over pages in random order, K and V; everything behind the end of a sequence is NaN."""
    longest = max(start + length for start, length in zip(starts, lengths, strict=True))
    pages_each = -(-longest // PAGE_SIZE) + 1
    table = torch.randperm(len(lengths) * pages_each).view(len(lengths), pages_each)
    kv = torch.full((2, table.numel(), 2, PAGE_SIZE, dim), float("nan"))
    spans: list[Span] = []
    for slot, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own = torch.arange(start + length)
        kv[:, table[slot, own // PAGE_SIZE], :, own % PAGE_SIZE] = torch.randn(start + length, 2, 2, dim)
        spans.append(Span(sum(lengths[:slot]), length, slot, start))
    batch = Batch(
        slots_T=torch.cat([torch.full((span.length,), span.slot) for span in spans]),
        positions_T=torch.cat([span.start + torch.arange(span.length) for span in spans]),
        page_table=table,
        spans=tuple(spans),
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64).view(-1, 4),
        decode_row=sum(lengths),
        decode_slots=(),
        max_decode_len=0,
    )
    return batch, kv


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([PAD_TOKENS], [0]),
        ([PAD_TOKENS - 1], [0]),
        ([PAD_TOKENS + 1], [0]),
        ([300, 2 * PAD_TOKENS, 40, 2 * PAD_TOKENS + 1], [0, 0, 70, 0]),  # one of these is behind a prefix
    ],
    ids=str,
)
def test_padded_prompts_equal_the_twin_and_few_shapes_reach_the_library(lengths, starts, monkeypatch):
    torch.manual_seed(sum(lengths))
    spec = HeadSpec(4, 2, 16, 1e-6)
    batch, (k, v) = prompts_over_nan(lengths, starts, spec.head_dim)
    q = torch.randn(sum(lengths), 4, spec.head_dim)
    expected = TorchOps().attention(q, spec, batch, k.nan_to_num(), v.nan_to_num())
    seen: list[tuple[object, ...]] = []
    library = F.scaled_dot_product_attention

    def noted(q_1HLN, k_1KLN, v_1KLN, **options):
        seen.append(tuple((tuple(each.shape), each.stride()) for each in (q_1HLN, k_1KLN, v_1KLN)))
        return library(q_1HLN, k_1KLN, v_1KLN, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    found = TritonOps(2, whole_prompt_tokens=100).attention(q, spec, batch, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    whole = [length for length, start in zip(lengths, starts, strict=True) if not start]
    assert len(seen) == len(whole)
    # A plan is cached by sizes and strides: prompts that are padded to the same length share both.
    assert [shapes[0][0][2] for shapes in seen] == [padded_length(length) for length in whole]
    rows = {length: (4 * spec.head_dim, length * spec.head_dim) for length in map(padded_length, whole)}
    assert [(shapes[0][1][2], shapes[1][1][1]) for shapes in seen] == [rows[padded_length(n)] for n in whole]


def test_few_lengths_stand_for_all_and_cost_little():
    for num_tokens in range(1, 40_000):
        padded = padded_length(num_tokens)
        assert padded % PAD_TOKENS == 0 and num_tokens <= padded
        assert padded - num_tokens < max(PAD_TOKENS, num_tokens / 8)
    assert padded_lengths(1024, 4097) == [1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608]
    assert set(padded_lengths(1000, 50_000)) == {padded_length(length) for length in range(1000, 50_001)}
    assert len(padded_lengths(1024, 1 << 20)) <= 80, "the warm-up runs each"
