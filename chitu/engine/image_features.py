"""Images in the steps of a runner: its table of them, and what a plan has the vision tower compute.

The patches of an image come as a file in memory (`EncodeImage.patches`), so that no byte of a foreign file is decoded
in this process. Every rank of an instance reads it and computes all features: they are the same on each. Step thread.
"""

from __future__ import annotations

from functools import partial

import torch
from safetensors.torch import load_file

from chitu.engine.batch import upload_tensor
from chitu.engine.executor import StepPlan
from chitu.errors import Internal
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.models.model import Model, vision_of
from chitu.ops.image_rows import ImageTable


def feature_pool(model: Model, num_rows: int, device: torch.device, model_hash: str, dtype: str) -> FeaturePool | None:
    """Return memory for so many feature rows, which an E can write to; None without rows, or if the model makes no
    features. `dtype`: the model's."""
    tower = vision_of(model)
    if tower is None or not num_rows:
        return None
    return FeaturePool(feature_layout(model_hash, tower.shape.width, dtype), num_rows, str(device))


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


def see(table: ImageTable | None, model: Model, plan: StepPlan) -> None:
    """Compute the features of the plan's images into their rows, and note where slots find those of their spans. Raises
    Internal if the model makes none, or if an image has another number of rows."""
    tower = vision_of(model)
    if table is None or tower is None:
        raise Internal("this model sees no images")
    counts = [len(table.numbers(each.rows)) for each in plan.encode]
    if plan.encode:
        features = tower.encode([load_file(each.patches) for each in plan.encode], counts, table.region.device)
        table.write(zip((each.rows for each in plan.encode), features, strict=True))
    for each in plan.place:
        table.place(each.slot, each.index, each.rows)
