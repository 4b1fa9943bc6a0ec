"""Random batches for tests of the operations: mixes of spans and decoding rows over shuffled pages."""

from __future__ import annotations

import random

import torch

from chitu.ops.interface import Batch, Span, tiles_of

NUM_PAGES, PAGE_SIZE, MAX_PAGES, NUM_SLOTS = 96, 16, 14, 6


def random_batch(seed: int) -> Batch:
    """Return slots with random page lists; random numbers of them prefill a span (some behind a prefix) or decode."""
    source = random.Random(seed)
    pages = list(range(NUM_PAGES))
    source.shuffle(pages)
    table = torch.tensor(pages[: NUM_SLOTS * MAX_PAGES]).view(NUM_SLOTS, MAX_PAGES)
    order = source.sample(range(NUM_SLOTS), NUM_SLOTS)
    cut = source.randint(0, NUM_SLOTS)
    slots: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for slot in order[:cut]:
        start = source.choice([0, 0, 5, 16, 70])
        length = source.choice([1, 2, 13, 16, 63, 64, 65, 130])
        spans.append(Span(len(slots), length, slot, start))
        slots += [slot] * length
        positions += range(start, start + length)
    decode_row = len(slots)
    for slot in order[cut:]:
        slots.append(slot)
        positions.append(source.choice([0, 1, 15, 16, 63, 64, 100, 200]))
    return Batch(
        slots_T=torch.tensor(slots),
        positions_T=torch.tensor(positions),
        page_table=table,
        spans=tuple(spans),
        spans_X4=torch.tensor([(s.row, s.length, s.slot, s.start) for s in spans], dtype=torch.int64).view(-1, 4),
        tiles_Y4=torch.tensor(tiles_of(spans), dtype=torch.int64).view(-1, 4),
        decode_row=decode_row,
        decode_slots=tuple(order[cut:]),
        max_decode_len=max(positions[decode_row:], default=-1) + 1,
    )
