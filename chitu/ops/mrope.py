"""Rotary positions of prompts with images (M-RoPE): pure, numpy only.

A row of an image has the position at which the image begins, plus its place in the grid: by time, height and width. The
text behind an image goes on behind the largest of these, with the same position in all three parts. So what comes
behind all images has the position of its index plus an offset, which the sizes of the images give.

Frames of a video are images. Some models rotate all frames of one by where it begins, each by its time: such a frame
goes on with the one before it (`continues`), and only the text behind the last one goes on behind them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GridSpan(Protocol):
    """Rows of a prompt that are of an image."""

    @property
    def start(self) -> int:
        """Position of the first."""
        ...

    @property
    def length(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows by time, height and width, whose product is `length`."""
        ...

    @property
    def time(self) -> int:
        """Position of its first rows by time, beyond that at which it begins."""
        ...

    @property
    def continues(self) -> bool:
        """Whether it begins at the position at which the span before it begins."""
        ...


def rope_offset(images: Iterable[GridSpan]) -> int:
    """Return what the rotary position of a token behind these images is more than its index."""
    offsets = [offset for _, _, offset in _begun(images)]
    return offsets[-1] if offsets else 0


def _begun(images: Iterable[GridSpan]) -> Iterator[tuple[GridSpan, int, int]]:
    """Yield each image with the rotary position at which it begins, and the offset of the text behind it."""
    begin = reach = offset = 0
    for image in images:
        if not image.continues:
            begin = reach = image.start + offset
        reach = max(reach, begin + max(image.time + 1, *image.grid[1:]))
        offset = reach - image.start - image.length
        yield image, begin, offset


def rope_positions(images: Iterable[GridSpan], start: int, length: int) -> NDArray[np.int64]:
    """Return the positions `[3, length]` of the tokens from index `start` on. `images`: all of the prompt's, in order;
    those behind these tokens may be left out, those before them may not."""
    end = start + length
    positions = np.broadcast_to(np.arange(start, end), (3, length)).copy()
    for image, begin, offset in _begun(images):
        if image.start >= end:
            break
        behind = image.start + image.length
        first, last = max(start, image.start), min(end, behind)
        if first < last:
            places = np.array(np.unravel_index(np.arange(first, last) - image.start, image.grid)) + begin
            places[0] += image.time
            positions[:, first - start : last - start] = places
        if behind < end:
            positions[:, max(start, behind) - start :] = np.arange(max(start, behind), end) + offset
    return positions
