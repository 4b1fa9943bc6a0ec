"""Rotary positions of prompts with images (M-RoPE): pure, numpy only.

A row of an image has the position at which the image begins, plus its place in the grid: by time, height and width. The
text behind an image goes on behind the largest of these, with the same position in all three parts. So what comes
behind all images has the position of its index plus an offset, which the sizes of the images give.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def rope_offset(images: Iterable[GridSpan]) -> int:
    """Return what the rotary position of a token behind these images is more than its index."""
    return sum(max(image.grid[1:]) - image.length for image in images)


def rope_positions(images: Iterable[GridSpan], start: int, length: int) -> NDArray[np.int64]:
    """Return the positions `[3, length]` of the tokens from index `start` on. `images`: all of the prompt's, in order;
    those behind these tokens may be left out, those before them may not."""
    end, offset = start + length, 0
    positions = np.broadcast_to(np.arange(start, end), (3, length)).copy()
    for image in images:
        if image.start >= end:
            break
        behind = image.start + image.length
        first, last = max(start, image.start), min(end, behind)
        if first < last:
            places = np.array(np.unravel_index(np.arange(first, last) - image.start, image.grid))
            positions[:, first - start : last - start] = places + (image.start + offset)
        offset += max(image.grid[1:]) - image.length
        if behind < end:
            positions[:, max(start, behind) - start :] = np.arange(max(start, behind), end) + offset
    return positions
