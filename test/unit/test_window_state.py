"""Window layers that keep their window in the state row: which tensors a model gets, what that saves, and the ring's
attention against attention over all positions."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.running_sum import SPEC

from chitu.engine.memory_budget import kv_layout
from chitu.errors import ConfigError, UnsupportedModel
from chitu.kv_cache.state_row import StateRow
from chitu.models.config import ModelSpec
from chitu.models.generic.window_attention import attend_in_rings
from chitu.models.window_state import KEYS, VALUES, with_window_state
from chitu.ops.interface import Batch, Span
from chitu.ops.masked_attention import AttentionKind
from chitu.protocol import CacheGroup, StateTensor

PAGE_SIZE = 16
GPT_OSS = (CacheGroup(tuple(range(0, 36, 2)), 8, (64, 64), window=128), CacheGroup(tuple(range(1, 36, 2)), 8, (64, 64)))
"""gpt-oss-120b: every second layer has a window."""
GEMMA = (
    CacheGroup(tuple(n for n in range(62) if (n + 1) % 6), 16, (128, 128), window=1024),
    CacheGroup(tuple(range(5, 62, 6)), 16, (128, 128)),
)
"""Gemma-3-27b: five of six."""


def spec_of(groups: tuple[CacheGroup, ...], max_model_len: int = 131072) -> ModelSpec:
    num_layers = sum(len(group.layers) for group in groups)
    return replace(SPEC, num_layers=num_layers, groups=groups, state=(), max_model_len=max_model_len, dtype="bfloat16")


def bytes_of(spec: ModelSpec, num_tokens: int, tp_size: int = 1) -> int:
    """Return what a request of this length holds on all ranks, which is what P sends of its prompt."""
    layout = kv_layout(spec, PAGE_SIZE, "bfloat16", tp_size)
    return tp_size * (-(-num_tokens // PAGE_SIZE) * layout.bytes_per_page + StateRow.of(layout).row_bytes)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "most"), [(GPT_OSS, 4096, 0.55), (GPT_OSS, 131072, 0.51), (GEMMA, 32 * 1024, 0.25)]
)
@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_request_holds_and_moves_the_pages_of_the_other_layers_and_one_window(
    groups: tuple[CacheGroup, ...], num_tokens: int, most: float, tp_size: int
) -> None:
    spec = spec_of(groups)
    assert bytes_of(with_window_state(spec), num_tokens, tp_size) <= most * bytes_of(spec, num_tokens, tp_size)
    one = kv_layout(with_window_state(spec), PAGE_SIZE, "bfloat16", tp_size)
    window = sum(
        len(group.layers) * 2 * 2 * group.num_kv_heads * group.head_dims[0] * (group.window or 0) for group in groups
    )
    assert one.state_bytes == window, "K and V in bfloat16, of the window's tokens and no others"


def test_each_window_layer_becomes_two_tensors_and_leaves_the_pages() -> None:
    spec = spec_of((CacheGroup((0, 2), 4, (8, 6), window=5), CacheGroup((1,), 4, (8, 6))))
    kept = with_window_state(replace(spec, state=(StateTensor(1, "sum", "float32", (4, 4)),)))
    assert kept.groups == (CacheGroup((1,), 4, (8, 6)),)
    assert kept.state == (
        StateTensor(0, KEYS, "auto", (4, 5, 8), heads=(4,)),
        StateTensor(0, VALUES, "auto", (4, 5, 6), heads=(4,)),
        StateTensor(1, "sum", "float32", (4, 4)),
        StateTensor(2, KEYS, "auto", (4, 5, 8), heads=(4,)),
        StateTensor(2, VALUES, "auto", (4, 5, 6), heads=(4,)),
    )
    assert with_window_state(spec, is_wanted=False) is spec
    assert with_window_state(replace(spec, max_model_len=5)).state == (), "no sequence exceeds the window"
    plain = spec_of((CacheGroup((0, 1), 4, (8, 8)),))
    assert with_window_state(plain) is plain
    with pytest.raises(ConfigError, match=r"cache.window_state: every layer .* has a window"):
        with_window_state(spec_of((CacheGroup((0, 1), 4, (8, 8), window=4),)))


# ------------------------------------------------------------------------------------------------- the ring's attention

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6


class History:
    """Sequences that are computed in ragged steps of chunks and single tokens, each with a row, which other sequences
    had before: it holds NaN."""

    def __init__(self, seed: int, window: int) -> None:
        self.random, self.window = random.Random(seed), window
        generator = torch.Generator().manual_seed(seed)
        self.lengths = [self.random.randrange(1, 5 * window) for _ in range(3)]
        self.done = [0, 0, 0]
        self.rows = self.random.sample(range(5), 3)
        self.q, self.k, self.v = (
            [torch.randn(length, heads, width, generator=generator) for length in self.lengths]
            for heads, width in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH))
        )
        self.k_ring = torch.full((5, KV_HEADS, window, WIDTH), torch.nan)
        self.v_ring = torch.full((5, KV_HEADS, window, VALUE_WIDTH), torch.nan)
        self.out: list[list[torch.Tensor]] = [[], [], []]

    def step(self, kind: AttentionKind) -> None:
        """Compute a chunk, or at a place other than the first a token, of some of the sequences."""
        chunks, tokens = [], []
        for index in range(3):
            left = self.lengths[index] - self.done[index]
            if left and self.random.random() < 0.7:
                if self.done[index] and self.random.random() < 0.5:
                    tokens.append((index, 1))
                else:
                    chunks.append((index, self.random.randrange(1, left + 1)))
        spans, row = [], 0
        for index, length in chunks:
            spans.append(Span(row, length, index, self.done[index], self.rows[index]))
            row += length
        parts = [(index, slice(self.done[index], self.done[index] + length)) for index, length in (*chunks, *tokens)]
        if not parts:
            return
        batch = Batch(
            slots_T=torch.tensor([index for index, part in parts for _ in range(part.start, part.stop)]),
            positions_T=torch.cat([torch.arange(part.start, part.stop) for _, part in parts]),
            page_table=torch.zeros(3, 1, dtype=torch.int64),
            spans=tuple(spans),
            spans_X4=torch.zeros(0, 4, dtype=torch.int64),
            tiles_Y4=torch.zeros(0, 4, dtype=torch.int64),
            decode_row=row,
            decode_slots=tuple(index for index, _ in tokens),
            max_decode_len=0,
            decode_states=tuple(self.rows[index] for index, _ in tokens),
        )
        q, k, v = (torch.cat([source[index][part] for index, part in parts]) for source in (self.q, self.k, self.v))
        out = attend_in_rings(q, k, v, batch, self.k_ring, self.v_ring, kind)
        for (index, part), rows in zip(parts, out.split([part.stop - part.start for _, part in parts]), strict=True):
            self.out[index].append(rows)
            self.done[index] = part.stop

    def error(self, seen_by_row: int) -> float:
        """Return the largest difference from attention over all positions, of which a row sees the last so many."""
        worst = 0.0
        for index, length in enumerate(self.lengths):
            columns, rows = torch.arange(length), torch.arange(length)[:, None]
            seen = (columns <= rows) & (columns > rows - seen_by_row)
            k, v = (x[index].transpose(0, 1).repeat_interleave(2, 0) for x in (self.k, self.v))
            scores = self.q[index].transpose(0, 1) @ k.transpose(1, 2) * WIDTH**-0.5
            expected = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
            worst = max(worst, float((torch.cat(self.out[index]) - expected).abs().max()))
        return worst


def test_rings_attend_as_full_windows_do_whatever_the_order_of_chunks_and_tokens() -> None:
    """Chunks are shorter and longer than the window; a window that is one position wrong shows."""
    wrong = []
    for seed in range(200):
        window = 1 + seed % 7
        history = History(seed, window)
        while history.done != history.lengths:
            history.step(AttentionKind(WIDTH**-0.5, window))
        assert history.error(window) < 1e-5, seed
        if max(history.lengths) > window + 1:
            wrong.append(min(history.error(window + 1), history.error(window - 1) if window > 1 else 1.0))
    assert len(wrong) > 100 and min(wrong) > 1e-3


def test_a_ring_of_another_size_than_the_window_is_refused() -> None:
    history = History(0, 4)
    with pytest.raises(UnsupportedModel, match=r"cache.window_state: .* window of 5 tokens, not 4"):
        while True:
            history.step(AttentionKind(1.0, 5))
