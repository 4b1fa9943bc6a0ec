"""Features of images, and the rows of a batch that take them: `ImageTable`.

Owns the feature region, a row for each placeholder of an image: the numbers that take the place of its embedding, then
those that are added behind the first layers. Who uses which row of it is decided elsewhere (`ImageSpan.rows`). Rows of
a batch are of an image by their position alone, never by their token: a placeholder that somebody types, or that the
model generates, is a token like any other. Called by the thread that runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from chitu.errors import Internal
from chitu.ops.interface import ImageRows, Span
from chitu.ops.mrope import GridSpan, rope_offset, rope_positions


class FeatureShape(NamedTuple):
    """What the features of a model are like."""

    hidden_size: int
    num_deep: int = 0
    """Layers behind which numbers of their own are added to rows of images."""
    uses_mrope: bool = False
    """Whether rows are rotated by their places in images."""
    whole_images: bool = False
    """Whether a row of an image attends to all rows of it."""

    @property
    def width(self) -> int:
        """Numbers of a feature row."""
        return self.hidden_size * (1 + self.num_deep)


class PlacedSpan(GridSpan, Protocol):
    """`ImageSpan` of a plan."""

    @property
    def rows(self) -> bytes:
        """Rows of the region, int32 LE; empty if they are not known."""
        ...


@dataclass(slots=True)
class _SlotImages:
    spans: Sequence[PlacedSpan]
    rows: list[NDArray[np.int64] | None]
    """Rows of the region of each span."""
    end: int
    """Position behind the last image."""
    offset: int
    """What rotary positions behind it are more than their indices."""


class ImageTable:
    """The images of the slots of one device, and the region with their features."""

    def __init__(
        self,
        shape: FeatureShape,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        upload: Callable[[torch.Tensor], torch.Tensor],
        region: torch.Tensor | None = None,
    ) -> None:
        """`upload` copies a tensor of the host to the device. `region`: the memory of the rows; None: its own."""
        self.shape = shape
        self.num_rows = num_rows
        self.region = torch.zeros(num_rows, shape.width, dtype=dtype, device=device) if region is None else region
        self._upload = upload
        self._slots: dict[int, _SlotImages] = {}

    def admit(self, slot: int, spans: Sequence[PlacedSpan], num_tokens: int) -> None:
        """Note the images of a sequence of so many tokens. Raises Internal for spans that overlap, end behind it, or
        whose grid is of another size."""
        end = 0
        for span in spans:
            fits = span.length > 0 and end <= span.start and span.start + span.length <= num_tokens
            if not fits or (self.shape.uses_mrope and int(np.prod(span.grid)) != span.length):
                raise Internal(
                    f"slot {slot}: an image at {span.start} with {span.length} rows, {span.grid}, is impossible"
                )
            end = span.start + span.length
        rows = [self._rows(slot, span, span.rows) if span.rows else None for span in spans]
        offset = rope_offset(spans) if self.shape.uses_mrope else 0
        self._slots[slot] = _SlotImages(spans, rows, end, offset)

    def place(self, slot: int, index: int, rows: bytes) -> None:
        """Note the rows of the region with the features of a slot's span."""
        images = self._slots.get(slot)
        if images is None or not 0 <= index < len(images.spans):
            raise Internal(f"slot {slot} has no image {index}")
        images.rows[index] = self._rows(slot, images.spans[index], rows)

    def forget(self, slot: int) -> None:
        """Forget the images of a slot, also if it has none."""
        self._slots.pop(slot, None)

    def _rows(self, slot: int, span: PlacedSpan, data: bytes) -> NDArray[np.int64]:
        rows = self.numbers(data)
        if len(rows) != span.length:
            raise Internal(f"slot {slot}: {len(rows)} feature rows for {span.length} rows of an image at {span.start}")
        return rows

    def numbers(self, data: bytes) -> NDArray[np.int64]:
        """Return rows of the region (int32 LE). Raises Internal if it has no such rows."""
        rows = np.frombuffer(data, dtype="<i4").astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise Internal(f"feature rows {rows.min()} to {rows.max()}, of {self.num_rows}")
        return rows

    def write(self, features: Iterable[tuple[bytes, torch.Tensor]]) -> None:
        """Write features `[rows, width]` to rows of the region (int32 LE)."""
        for data, features_MW in features:
            rows = self.numbers(data)
            if features_MW.shape != (len(rows), self.shape.width):
                raise Internal(f"features {tuple(features_MW.shape)} for {len(rows)} rows of {self.shape.width}")
            self.region[self._upload(torch.from_numpy(rows))] = features_MW.to(self.region.dtype)

    def read(self, data: bytes) -> torch.Tensor:
        """Return a copy of the features `[rows, width]` in rows of the region (int32 LE)."""
        return self.region[self._upload(torch.from_numpy(self.numbers(data)))]

    # ------------------------------------------------------------------------------------------------- rows of a batch

    def rope(self, spans: Sequence[Span], slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor | None:
        """Return the rotary positions `[3, T]` of the rows of spans, then of single rows of `slots`; None if they are
        the indices of all."""
        if not self.shape.uses_mrope or not self._has_any(spans, slots):
            return None
        parts = []
        for span in spans:
            images = self._slots.get(span.slot)
            parts.append(rope_positions(images.spans if images is not None else (), span.start, span.length))
        single = np.array(positions, dtype=np.int64)
        for row, slot in enumerate(slots):
            if (images := self._slots.get(slot)) is not None:
                single[row] += images.offset
        parts.append(np.broadcast_to(single, (3, len(single))))
        return self._upload(torch.from_numpy(np.ascontiguousarray(np.concatenate(parts, axis=1))))

    def rows(self, spans: Sequence[Span], slots: Sequence[int], positions: Sequence[int]) -> ImageRows | None:
        """Return the rows of these spans that are of images; None without any. Raises Internal for one whose features
        are not known, and for a single row (`slots`, `positions`) before the end of an image: no chunk computed it."""
        if not self._has_any(spans, slots):
            return None
        for slot, position in zip(slots, positions, strict=True):
            if (images := self._slots.get(slot)) is not None and position < images.end:
                raise Internal(f"slot {slot}: a token at {position} is decoded, before the end of an image")
        places: list[NDArray[np.int64]] = []
        runs: list[tuple[Span, PlacedSpan, int, int]] = []
        for span in spans:
            images = self._slots.get(span.slot)
            for index, image in enumerate(images.spans if images is not None else ()):
                first = max(span.start, image.start)
                last = min(span.start + span.length, image.start + image.length)
                if first >= last:
                    continue
                rows = images.rows[index] if images is not None else None
                if rows is None:
                    raise Internal(f"slot {span.slot}: the image at {image.start} has no features")
                where = np.arange(first, last) + (span.row - span.start)
                places.append(np.stack((where, rows[first - image.start : last - image.start])))
                runs.append((span, image, first, last))
        if not places:
            return None
        both_2M = self._upload(torch.from_numpy(np.concatenate(places, axis=1)))
        features, *deeper = self.region[both_2M[1]].chunk(1 + self.shape.num_deep, dim=1)
        ends_T = self._ends(spans, positions, runs) if self.shape.whole_images else None
        return ImageRows(both_2M[0], features, tuple(deeper), ends_T)

    def _has_any(self, spans: Sequence[Span], slots: Sequence[int]) -> bool:
        return bool(self._slots) and not self._slots.keys().isdisjoint([*(span.slot for span in spans), *slots])

    def _ends(
        self, spans: Sequence[Span], positions: Sequence[int], runs: Sequence[tuple[Span, PlacedSpan, int, int]]
    ) -> torch.Tensor:
        """Return the last position that each row sees. `runs`: chunk, image, and the positions that both have."""
        chunks = [np.arange(span.start, span.start + span.length) for span in spans]
        ends_T = np.concatenate([*chunks, np.array(positions, dtype=np.int64)])
        for span, image, first, last in runs:
            if last < image.start + image.length:
                raise Internal(f"slot {span.slot}: a chunk ends at {last}, inside the image at {image.start}")
            row = span.row - span.start
            ends_T[first + row : last + row] = last - 1
        return self._upload(torch.from_numpy(ends_T))
