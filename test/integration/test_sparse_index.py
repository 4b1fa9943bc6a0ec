"""Sparse attention by an index: the chosen positions against a plain loop, and faults that the comparison finds."""

from __future__ import annotations

import pytest
import torch

from chitu.ops.interface import Batch, LatentHeads, Span, tiles_of
from chitu.ops.sparse_index import ChosenPositions, append_keys, choose, chosen_attention
from chitu.ops.torch_ops import TorchOps

PAGE_SIZE, LATENT, ROPE, KEY, TOP_K, HEADS, INDEX_HEADS = 4, 12, 4, 8, 6, 3, 5


def make_batch() -> Batch:
    """Return a first chunk, a later chunk and two decoding rows of different lengths, on scattered pages."""
    spans = (Span(0, 9, 0, 0), Span(9, 7, 1, 10))
    positions = [*range(9), *range(10, 17), 20, 3]
    return Batch(
        slots_T=torch.tensor([0] * 9 + [1] * 7 + [2, 3]),
        positions_T=torch.tensor(positions),
        page_table=torch.randperm(24).view(4, 6),
        spans=spans,
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans]),
        tiles_Y4=torch.tensor(tiles_of(spans)),
        decode_row=16,
        decode_slots=(2, 3),
        max_decode_len=21,
    )


def plain(q: torch.Tensor, weights: torch.Tensor, keys_MI: torch.Tensor, seen: int) -> set[int]:
    """Return the best positions below `seen` for one row, in float64."""
    products = (q.double() @ keys_MI[:seen].double().T).clamp(min=0)
    scores = (weights.double().unsqueeze(1) * products).sum(0)
    return set(scores.topk(min(TOP_K, seen)).indices.tolist())


def pages_of(width: int) -> torch.Tensor:
    return torch.randn(24, 1, PAGE_SIZE, width)


@pytest.mark.parametrize("max_scores", [1 << 26, 1])
def test_each_row_has_its_best_positions(max_scores):
    torch.manual_seed(1)
    batch, keys = make_batch(), pages_of(KEY)
    append_keys(torch.randn(18, KEY), batch, keys)
    q, weights = torch.randn(18, INDEX_HEADS, KEY), torch.randn(18, INDEX_HEADS)
    choice = choose(q, weights, batch, keys, TOP_K, max_scores)
    assert choice is not None and choice.decode_BM is not None
    masks = [row for mask in choice.spans for row in mask] + list(choice.decode_BM)
    for row, mask in enumerate(masks):
        slot, position = int(batch.slots_T[row]), int(batch.positions_T[row])
        keys_MI = keys[batch.page_table[slot]].flatten(0, 2)
        assert set(mask.nonzero().flatten().tolist()) == plain(q[row], weights[row], keys_MI, position + 1)


def test_nothing_is_chosen_if_no_row_sees_more_than_the_best():
    batch, q, weights = make_batch(), torch.randn(18, INDEX_HEADS, KEY), torch.randn(18, INDEX_HEADS)
    assert choose(q, weights, batch, pages_of(KEY), 21) is None
    assert choose(q, weights, batch, pages_of(KEY), 20) is not None


def test_attention_over_all_visible_positions_is_dense_attention_and_one_less_is_not():
    torch.manual_seed(2)
    batch, pages = make_batch(), pages_of(LATENT + ROPE)
    pages[batch.page_table[3, 1:]] = torch.nan  # behind the end of the shortest sequence
    heads = LatentHeads(HEADS, LATENT, ROPE, 0.3, 1e-6, torch.ones(LATENT))
    q = torch.randn(18, HEADS, LATENT + ROPE)
    ends = [span.start + span.length for span in batch.spans]
    seen = [
        torch.arange(end) <= batch.positions_T[s.row : s.row + s.length, None]
        for s, end in zip(batch.spans, ends, strict=True)
    ]
    decode = torch.arange(24) <= batch.positions_T[16:, None]
    dense = TorchOps().latent_attention(q, heads, batch, pages)
    found = chosen_attention(q, heads, batch, pages, ChosenPositions(tuple(seen), decode))
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6)
    seen[1] = seen[1] & (torch.arange(17) != 5)
    planted = chosen_attention(q, heads, batch, pages, ChosenPositions(tuple(seen), decode))
    assert (planted - dense).abs()[9:16].amax() > 1e-3
