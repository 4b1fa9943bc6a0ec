"""The self-check of what a generic model does with images: the same as `check.py`, with features in some rows.

Owns the promise that rows of images are rotated, attended and given deeper features as the library's whole body does:
it gets random features in the place of patches, so that no tower runs. Also finds whether rows of an image see all of
it, which no attribute of a model tells: what is computed both ways is compared. A model that fails serves text alone.
Runs once, behind the check of text, and only for models that make features.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from chitu.errors import UnsupportedModel
from chitu.models.config import ModelSpec
from chitu.models.generic.check import LENGTHS, Checked, CheckRows, ScratchCache, batch_of, beyond, shrunk, steps
from chitu.models.generic.library import library_version
from chitu.models.generic.vision import Vision
from chitu.ops.image_rows import FeatureShape, ImageTable
from chitu.ops.interface import Batch
from chitu.protocol import pack_i32

IMAGES: tuple[tuple[tuple[int, tuple[int, int, int]], ...], ...] = (
    (),
    ((3, (1, 3, 4)),),
    ((13, (1, 3, 4)), (26, (1, 2, 3))),  # the first one crosses the border of a chunk
)
"""By sequence of `LENGTHS`: first position and grid of its images."""
MOST_TOKENS = 1000
"""Ids from which the tokens of the sequences are drawn, at most."""

logger = logging.getLogger(__name__)


class CheckedWithImages(Checked, Protocol):
    def image_reference(
        self, token_ids_T: torch.Tensor, grids: Sequence[tuple[int, int, int]], features: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the hidden states of one sequence with images by the library's whole body, without pages."""
        ...


class CheckedImage(NamedTuple):
    """An image of a sequence: `PlacedSpan`."""

    start: int
    length: int
    grid: tuple[int, int, int]
    rows: bytes
    time: int = 0
    continues: bool = False


class CheckedPrompt(NamedTuple):
    token_ids_T: torch.Tensor
    images: tuple[CheckedImage, ...]
    logits_TV: torch.Tensor
    """Those of the library."""

    def kind_of(self, position: int) -> str:
        """Return what the row at a position is."""
        if any(image.start <= position < image.start + image.length for image in self.images):
            return "a row of an image"
        return "a token behind an image" if self.images and position > self.images[0].start else "a token"


def check_images(model: CheckedWithImages, vision: Vision, spec: ModelSpec, device: torch.device) -> None:
    """Raise UnsupportedModel if rows of images are not computed as the library does. Sets `vision.is_whole`. Logs what
    it cost."""
    started = time.perf_counter()
    try:
        with torch.inference_mode(), model.alone(), shrunk(model.parts_with_limits()):
            reason, worst = _found(model, vision, spec, device)
    except (torch.OutOfMemoryError, UnsupportedModel):
        raise
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"the code of transformers {library_version()} cannot be given features: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if reason:
        raise UnsupportedModel(reason)
    logger.info(
        "%s, images in it%s: was checked in %.1f s: largest error %.1e of the largest logit",
        spec.architecture,
        ", whose rows see all of their image" if vision.is_whole else "",
        time.perf_counter() - started,
        worst,
    )


class ImageReading(NamedTuple):
    """What was found with rows of images that see all of their image, or that do not."""

    is_whole: bool
    errors: dict[str, torch.Tensor]

    @property
    def size(self) -> float:
        return sum(float(apart.median()) for apart in self.errors.values())


def _found(model: CheckedWithImages, vision: Vision, spec: ModelSpec, device: torch.device) -> tuple[str, float]:
    """Return why images are not computed as the library does (empty if they are), and the worst error."""
    is_exact = model.dtype == torch.float32
    vision.is_whole = False
    features = _features(vision.shape, model.dtype, device)
    prompts = _prompts(model, vision, spec, features, device)
    readings = [ImageReading(False, _errors_of(model, vision.shape, spec, prompts, features, device))]
    is_right = not list(beyond(readings[0].errors, is_exact))
    if not is_right or not is_exact:  # with fewer bits both may be within the bound
        vision.is_whole = True
        try:
            readings.append(ImageReading(True, _errors_of(model, vision.shape, spec, prompts, features, device)))
        except UnsupportedModel:
            if not is_right:
                raise
    best = min(readings, key=lambda reading: reading.size)
    vision.is_whole = best.is_whole
    for kind, found, bound in beyond(best.errors, is_exact):
        return (
            f"computed in batches over pages, {kind} has logits that are {found:.2g} of the largest away from those of "
            f"transformers {library_version()} (bound {bound:g})"
        ), found
    return "", max(float(apart.max()) for apart in best.errors.values())


def _features(shape: FeatureShape, dtype: torch.dtype, device: torch.device) -> list[list[torch.Tensor]]:
    """Return random features `[rows, width]` of the images of each sequence."""
    generator = torch.Generator().manual_seed(4)
    return [
        [torch.randn(h * w * t, shape.width, generator=generator).to(device, dtype) for _, (t, h, w) in images]
        for images in IMAGES
    ]


def _prompts(
    model: CheckedWithImages,
    vision: Vision,
    spec: ModelSpec,
    features: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> list[CheckedPrompt]:
    generator, special, prompts, row = torch.Generator().manual_seed(3), vision.special_tokens(), [], 0
    usual = torch.tensor([token for token in range(min(spec.vocab_size, MOST_TOKENS)) if token not in special])
    order = torch.randperm(_num_rows(features), generator=generator).tolist()
    for length, images, parts in zip(LENGTHS, IMAGES, features, strict=True):
        tokens_T = usual[torch.randint(len(usual), (length,), generator=generator)]
        placed = []
        for (start, grid), part in zip(images, parts, strict=True):
            count = len(part)
            tokens_T[start : start + count] = vision.placeholder
            placed.append(CheckedImage(start, count, grid, pack_i32(order[row : row + count])))
            row += count
        tokens_T, grids = tokens_T.to(device), [grid for _, grid in images]
        hidden_TD = model.image_reference(tokens_T, grids, parts) if images else model.reference(tokens_T, 0)
        prompts.append(CheckedPrompt(tokens_T, tuple(placed), model.own_logits(hidden_TD)))
    return prompts


def _num_rows(features: Sequence[Sequence[torch.Tensor]]) -> int:
    return sum(len(part) for parts in features for part in parts)


def _errors_of(
    model: CheckedWithImages,
    shape: FeatureShape,
    spec: ModelSpec,
    prompts: Sequence[CheckedPrompt],
    features: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Return, by kind of row, the error of each row's logits as a share of the largest of its sequence."""
    cache = ScratchCache(spec, model.shard.size if model.shard is not None else 1, model.dtype, device)
    table = ImageTable(shape, _num_rows(features), model.dtype, device, lambda values: values.to(device))
    for slot, (prompt, parts) in enumerate(zip(prompts, features, strict=True)):
        table.write((image.rows, part) for image, part in zip(prompt.images, parts, strict=True))
        table.admit(slot, prompt.images, len(prompt.token_ids_T))

    def end_of(slot: int, end: int) -> int:
        inside = [i for i in prompts[slot].images if shape.whole_images and i.start < end < i.start + i.length]
        return inside[0].start + inside[0].length if inside else end

    errors: dict[str, list[float]] = {}
    for step in steps(end_of):
        tokens_T = torch.cat([prompts[rows.slot].token_ids_T[rows.start : rows.start + rows.length] for rows in step])
        batch = _with_images(batch_of(step, cache, bool(spec.state)), step, table)
        logits_TV, first = model.own_logits(model.forward(tokens_T, batch, cache)), 0
        for rows in step:
            prompt, own = prompts[rows.slot], logits_TV[first : first + rows.length]
            apart = (own - prompt.logits_TV[rows.start : rows.start + rows.length]).abs().amax(1)
            for index, error in enumerate((apart / prompt.logits_TV.abs().max()).tolist()):
                errors.setdefault(prompt.kind_of(rows.start + index), []).append(error)
            first += rows.length
    return {kind: torch.tensor(each).nan_to_num(torch.inf, torch.inf) for kind, each in errors.items()}


def _with_images(batch: Batch, step: Sequence[CheckRows], table: ImageTable) -> Batch:
    slots, positions = batch.decode_slots, [rows.start for rows in step[len(batch.spans) :]]
    return replace(
        batch, rope_3T=table.rope(batch.spans, slots, positions), images=table.rows(batch.spans, slots, positions)
    )
