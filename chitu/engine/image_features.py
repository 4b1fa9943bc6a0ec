"""Images in the steps of a runner: its table of them, and what a plan has the vision tower compute.

The patches of an image come as a file in memory (`EncodeImage.patches`), so that no byte of a foreign file is decoded
in this process. Every rank of an instance, all on one host, reads it and computes all features: they are the same on
each. Step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from chitu.engine.batch import upload_tensor
from chitu.engine.executor import EncodeImage, StepPlan, TowerCost, TowerTurn
from chitu.engine.tower_turns import TowerTurns
from chitu.errors import DamagedFeatures, Internal
from chitu.kv_cache.checksum import odd_numbers
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.models.feature_mark import feature_mark
from chitu.models.model import AtBlock, Model, VisionTower, vision_of
from chitu.ops.image_rows import ImageTable

Numbers = NDArray[np.int64]


def feature_pool(
    model: Model, num_rows: int, device: torch.device, model_hash: str, dtype: str, tp_size: int = 1
) -> FeaturePool | None:
    """Return memory for so many feature rows on one of `tp_size` ranks, which an E can write to; None without rows, or
    if the model makes no features. `dtype`: the model's."""
    tower = vision_of(model)
    if tower is None or not num_rows:
        return None
    pool = FeaturePool(feature_layout(model_hash, tower.shape.width, dtype, tp_size), num_rows, str(device))
    pool.mark = feature_mark(tower.tensors())
    return pool


def image_table(
    model: Model, num_rows: int, device: torch.device, pool: FeaturePool | None = None
) -> ImageTable | None:
    """Return a table with so many feature rows, those of `pool` if it is given; None without rows, or if the model
    makes no features."""
    tower = vision_of(model)
    if tower is None or not num_rows:
        return None
    upload, region = partial(upload_tensor, device=device), pool.features if pool is not None else None
    return ImageTable(tower.shape, num_rows, model.dtype, device, upload, region)


def tower_cost(model: Model) -> TowerCost | None:
    """Return what a block of the model's tower costs; None without one."""
    tower = vision_of(model)
    return TowerCost(*tower.block_cost()) if tower is not None else None


class ImageSteps:
    """What the plans of a runner do with images. Step thread only."""

    def __init__(self, table: ImageTable | None) -> None:
        """`table`: None if the model sees none."""
        self._table = table
        self._turns: TowerTurns | None = None
        """The images that the tower computes in turns."""
        self._copies: dict[int, tuple[torch.Tensor, Numbers]] = {}
        """Features in host memory, with their sums, by number."""

    def see(self, model: Model, plan: StepPlan) -> None:
        """Compute the features of the plan's images into their rows, or as much of that as the plan has a turn for, and
        note where slots find those of their spans. Raises Internal if the model makes none, or if an image has another
        number of rows. What raises gives up all images of the tower."""
        if not (plan.encode or plan.turn or plan.place or plan.drop_images or plan.save_images or plan.load_images):
            return
        table, tower = self._table, vision_of(model)
        if table is None or tower is None:
            raise Internal("this model sees no images")
        self._move(table, plan)
        if plan.encode:
            self.drop()
            encode = partial(self._encode, table, tower, plan.encode)
            if plan.turn:
                self._turns = TowerTurns(encode, table.region.device)
            else:
                encode()
        for turn in plan.turn:
            self._advance(turn)
        for each in plan.place:
            table.place(each.slot, each.index, each.rows)

    def drop(self) -> None:
        """Give up what the tower computes in turns."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.drop()

    def close(self) -> None:
        """Give up all that is computed or saved."""
        self.drop()
        self._copies.clear()

    def _move(self, table: ImageTable, plan: StepPlan) -> None:
        """Drop, save and load features."""
        for number in plan.drop_images:
            self._copies.pop(number, None)
        for save in plan.save_images:
            features_MW = table.read(save.rows)
            host_MW = torch.empty(features_MW.shape, dtype=features_MW.dtype, pin_memory=features_MW.is_cuda)
            host_MW.copy_(features_MW)
            self._copies[save.number] = host_MW, _sums(host_MW)
        for load in plan.load_images:
            if load.number not in self._copies:
                raise Internal(f"no features are saved under {load.number}")
            host_MW, sums_M = self._copies[load.number]
            if not np.array_equal(_sums(host_MW), sums_M):
                raise DamagedFeatures("the features of an image were damaged in host memory")
            table.write([(load.rows, host_MW.to(table.region.device, non_blocking=True))])

    def _advance(self, turn: TowerTurn) -> None:
        if turn.blocks <= 0:
            self.drop()
            return
        turns, self._turns = self._turns, None
        if turns is None:
            raise Internal(f"{turn}, but the vision tower has no images")
        turns.advance(turn)
        if not turn.is_last:
            self._turns = turns

    @staticmethod
    def _encode(
        table: ImageTable, tower: VisionTower, images: Sequence[EncodeImage], at_block: AtBlock | None = None
    ) -> None:
        counts = [len(table.numbers(each.rows)) for each in images]
        features = tower.encode([load_file(each.patches) for each in images], counts, table.region.device, at_block)
        table.write(zip((each.rows for each in images), features, strict=True))


def _sums(features_MW: torch.Tensor) -> Numbers:
    """Return a checksum of each row, in which each place has a weight of its own."""
    words = features_MW.contiguous().view(torch.uint8).numpy()
    words_MN = words.view(np.int64 if words.shape[1] % 8 == 0 else np.int16)
    with np.errstate(over="ignore"):
        return np.asarray(words_MN.astype(np.int64, copy=False) @ odd_numbers(1, words_MN.shape[1]))
