"""Batches on the device for the tests of kernels."""

from __future__ import annotations

import random

import torch

from chitu.ops.interface import Batch, Span, tiles_of

PAGE = 16


def batch_on(card, seed: int, longest: int | None = None) -> tuple[Batch, int]:
    """Return spans, some behind a prefix, then decoding rows of very different lengths, over shuffled pages; and the
    number of pages."""
    source = random.Random(seed)
    longest = longest or card.size(6000, 150)
    num_spans, num_decodes = card.size(4, 2), card.size(40, 3)
    num_slots, pages_each = num_spans + num_decodes, -(-longest // PAGE)
    pages = list(range(num_slots * pages_each))
    source.shuffle(pages)
    slots, positions, spans = [], [], []
    for slot in range(num_spans):
        start = source.choice([0, 0, 5, longest // 4])
        length = min(source.choice([1, 63, 64, 65, longest // 2]), longest - start)
        spans.append(Span(len(slots), length, slot, start))
        slots += [slot] * length
        positions += range(start, start + length)
    decode_row = len(slots)
    for slot in range(num_spans, num_slots):
        slots.append(slot)
        positions.append(min(source.choice([0, 15, 16, 64, longest // 3, longest - 1]), longest - 1))
    on = card.device
    batch = Batch(
        slots_T=torch.tensor(slots, device=on),
        positions_T=torch.tensor(positions, device=on),
        page_table=torch.tensor(pages, device=on).view(num_slots, pages_each),
        spans=tuple(spans),
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64).view(-1, 4),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64, device=on).view(-1, 4),
        decode_row=decode_row,
        decode_slots=tuple(range(num_spans, num_slots)),
        max_decode_len=max(positions[decode_row:]) + 1,
    )
    return batch, len(pages)
