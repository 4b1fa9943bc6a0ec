"""The mark of the weights that features are made with: the same for a whole model and for its tower alone, of every
family, and another one once numbers change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from image_checkpoints import FAMILIES_WITH_VISION, write_vision_checkpoint

from chitu.engine.build import load_model
from chitu.engine.encoder import LoneTower, TowerEncoder, load_tower
from chitu.kv_cache.feature_pool import FeaturePool, feature_layout
from chitu.models.config import read_model_spec
from chitu.models.feature_mark import feature_mark
from chitu.models.model import vision_of
from chitu.ops.image_rows import ImageTable
from chitu.protocol import FEATURE_MARK_BYTES

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.engine]


def tower_of(folder: Path, dtype: torch.dtype = torch.float32) -> LoneTower:
    spec = read_model_spec(str(folder), 512, "transformers")
    return load_tower(str(folder), spec, dtype, torch.device("cpu"), lambda done, total: None)


@pytest.mark.parametrize("name", FAMILIES_WITH_VISION)
def test_a_tower_alone_has_the_mark_of_the_whole_model(name: str, tmp_path: Path) -> None:
    write_vision_checkpoint(tmp_path, name)
    whole = vision_of(load_model(tmp_path, "float32", images=True))
    assert whole is not None
    mark = feature_mark(whole.tensors())
    assert feature_mark(tower_of(tmp_path).tensors) == mark and len(mark) == FEATURE_MARK_BYTES
    assert feature_mark(tower_of(tmp_path, torch.bfloat16).tensors) != mark


def test_an_e_has_the_mark_of_the_numbers_that_it_computes_with(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        write_vision_checkpoint(tmp_path / name, "qwen3_vl")
    old, new = tower_of(tmp_path / "old"), tower_of(tmp_path / "new")
    with torch.inference_mode():
        for tensor in new.tensors.values():
            tensor += 1
    marks = feature_mark(old.tensors), feature_mark(new.tensors)
    shape = old.vision.shape
    pool = FeaturePool(feature_layout("m", shape.width, "float32"), 4)
    table = ImageTable(shape, 4, torch.float32, pool.device, torch.tensor, pool.features)
    encoder = TowerEncoder(old, pool, table, 512, 1, marks[0])
    encoder.change_model(new)
    assert marks[0] != marks[1] == encoder.mark == feature_mark(encoder.tower.tensors())


Change = Callable[[dict[str, torch.Tensor]], object]
CHANGES: list[Change] = [
    lambda tensors: tensors.update(a=tensors["a"].double()),
    lambda tensors: tensors.update(a=tensors["a"].view(100, 100)),
    lambda tensors: tensors.update(c=tensors.pop("b")),
    lambda tensors: tensors.pop("empty"),
    lambda tensors: tensors["a"].add_(1e-3),
    lambda tensors: tensors["b"].neg_(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_mark_differs_with_names_and_shapes_and_numbers(change: Change) -> None:
    tensors = {"a": torch.arange(10000.0), "b": torch.tensor(2.0), "empty": torch.zeros(0)}
    before = feature_mark(tensors)
    assert feature_mark(dict(reversed(tensors.items()))) == before
    change(tensors)
    assert feature_mark(tensors) != before
