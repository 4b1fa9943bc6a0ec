"""Rotary positions of prompts with images, and the rows that take features."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from chitu.engine.executor import ImageSpan
from chitu.errors import Internal
from chitu.ops.image_rows import FeatureShape, ImageTable
from chitu.ops.interface import Span
from chitu.ops.mrope import rope_offset, rope_positions
from chitu.protocol import pack_i32

IMAGES = (ImageSpan(3, 6, (1, 2, 3)), ImageSpan(9, 1, (1, 1, 1)), ImageSpan(12, 8, (1, 4, 2)))


def by_hand(images: tuple[ImageSpan, ...], length: int) -> np.ndarray:
    """Return positions token by token: those of a text count up from behind the largest so far."""
    found: list[tuple[int, int, int]] = []
    starts = {image.start: image for image in images}
    following = 0
    while len(found) < length:
        image = starts.get(len(found))
        if image is None:
            found.append((following, following, following))
            following += 1
            continue
        times, heights, widths = image.grid
        found += [
            (following + t, following + h, following + w)
            for t in range(times)
            for h in range(heights)
            for w in range(widths)
        ]
        following += max(heights, widths)
    return np.array(found).T


def test_positions_are_those_of_counting_token_by_token_wherever_a_chunk_begins():
    whole = by_hand(IMAGES, 30)
    assert (rope_positions(IMAGES, 0, 30) == whole).all()
    for start in range(30):
        for length in (1, 2, 7, 30 - start):
            length = min(length, 30 - start)
            assert (rope_positions(IMAGES, start, length) == whole[:, start : start + length]).all(), (start, length)
    assert rope_offset(IMAGES) == whole[0, 29] - 29 == -7
    assert (rope_positions((), 5, 3) == [[5, 6, 7]] * 3).all()


def table(**shape: bool) -> ImageTable:
    return ImageTable(FeatureShape(4, num_deep=1, **shape), 40, torch.float32, torch.device("cpu"), lambda x: x)


def test_rows_take_the_features_of_their_place_in_the_image():
    images, order = table(uses_mrope=True), random.Random(2).sample(range(40), 15)
    features = torch.randn(15, 8, generator=torch.Generator().manual_seed(1))
    images.write([(pack_i32(order), features)])
    parts = [order[:6], order[6:7], order[7:]]
    spans = tuple(
        ImageSpan(each.start, each.length, each.grid, pack_i32(rows)) for each, rows in zip(IMAGES, parts, strict=True)
    )
    images.admit(1, spans, 30)
    images.admit(2, [ImageSpan(0, 6, (1, 2, 3))], 9)
    images.place(2, 0, pack_i32(order[:6]))
    spans_of_step = [Span(0, 5, 0, 100), Span(5, 10, 1, 7), Span(15, 2, 2, 4)]
    rows = images.rows(spans_of_step, [1], [29])
    assert rows is not None and rows.ends_T is None
    assert rows.rows_M.tolist() == [5, 6, 7, 10, 11, 12, 13, 14, 15, 16]
    wanted = features[[4, 5, 6, 7, 8, 9, 10, 11, 4, 5]]
    assert torch.equal(torch.cat((rows.features_MD, *rows.deeper), 1), wanted)
    rope = images.rope(spans_of_step, [1], [29])
    assert rope is not None and rope[:, -1].tolist() == [22] * 3 and rope[:, :5].tolist() == [[*range(100, 105)]] * 3
    assert (rope[:, 5:15].numpy() == by_hand(IMAGES, 30)[:, 7:17]).all()
    images.forget(1)
    images.forget(2)
    assert images.rows(spans_of_step, [1], [29]) is None and images.rope(spans_of_step, [1], [29]) is None


def test_rows_of_whole_images_see_their_last_one():
    images = table(whole_images=True)
    images.admit(1, [ImageSpan(2, 3, rows=pack_i32([5, 6, 7])), ImageSpan(6, 2, rows=pack_i32([8, 9]))], 20)
    rows = images.rows([Span(0, 2, 0, 0), Span(2, 7, 1, 3)], [0], [11])
    assert rows is not None and rows.ends_T is not None
    assert rows.ends_T.tolist() == [0, 1, 4, 4, 5, 7, 7, 8, 9, 11]
    with pytest.raises(Internal, match="ends at 7, inside the image at 6"):
        images.rows([Span(0, 4, 1, 3)], [], [])


def test_impossible_images_are_refused():
    images = table(uses_mrope=True)
    for spans in (
        [ImageSpan(0, 3, (1, 2, 3))],
        [ImageSpan(5, 6, (1, 2, 3))],
        [ImageSpan(0, 6, (1, 2, 3)), ImageSpan(5, 1, (1, 1, 1))],
        [ImageSpan(0, 6, (1, 2, 3), pack_i32([1, 2, 3]))],
        [ImageSpan(0, 2, (1, 1, 2), pack_i32([1, 40]))],
    ):
        with pytest.raises(Internal):
            images.admit(0, spans, 10)
    with pytest.raises(Internal, match="slot 0 has no image 0"):
        images.place(0, 0, pack_i32([1]))
