"""Every form of weights comes from a neighbour bit for bit as it is in the folder: blocks of GGUF, FP8 that is kept and
cut for ranks, several files, modules of transformers, and the tower of an E."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checkpoints import logits_of, write_checkpoint
from image_checkpoints import write_vision_checkpoint
from support.gguf_files import convert
from test_kept_fp8 import folders_of
from thread_ranks import Meeting, ThreadRank
from weights_sources import Source, pieces_from, serving

from chitu.engine import build
from chitu.engine.build import load_model
from chitu.engine.encoder import load_tower
from chitu.models.config import read_model_spec
from chitu.models.gguf import read_headers
from chitu.models.gguf_config import config_of
from chitu.models.tensors import tensors_of
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.usefixtures("one_thread")
Load = Callable[[Path, Any], object]


def gguf(folder: Path) -> Path:
    make_model(folder / "plain", layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=500)
    made = folder / "made"
    made.mkdir()
    file = convert(folder / "plain", made / "model.gguf", "Q8_0")
    (made / "config.json").write_text(json.dumps(config_of(read_headers([file]))))
    return made


def fp8(folder: Path) -> Path:
    return folders_of(folder, "qwen3_moe in small blocks")[0]


def several(folder: Path) -> Path:
    write_checkpoint(folder, "qwen3", max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def vision(folder: Path) -> Path:
    write_vision_checkpoint(folder, "qwen3_vl")
    return folder


def whole(folder: Path, pieces: Any, **options: Any) -> object:
    return load_model(folder, "float32", max_model_len=64, pieces=pieces, **options)


def of_two_ranks(folder: Path, pieces: Any) -> object:
    meeting = Meeting(2)
    return [whole(folder, pieces, shard=ThreadRank(meeting, rank)) for rank in range(2)]


def with_images(folder: Path, pieces: Any) -> object:
    return whole(folder, pieces, images=True)


def by_modules(folder: Path, pieces: Any) -> object:
    return whole(folder, pieces, code="transformers")


def tower(folder: Path, pieces: Any) -> object:
    spec = read_model_spec(str(folder), 512, "transformers")
    return load_tower(str(folder), spec, torch.float32, torch.device("cpu"), lambda done, total: None, pieces).tensors


@pytest.mark.parametrize(
    ("make", "load"),
    [
        *((make, load) for make in (gguf, fp8) for load in (whole, of_two_ranks)),
        *((several, load) for load in (whole, by_modules)),
        *((vision, load) for load in (with_images, tower)),
    ],
)
def test_a_form_comes_from_a_neighbour_as_it_is_in_the_folder(
    make: Callable[[Path], Path], load: Load, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    with serving(Source(folder)) as sources:
        pieces = pieces_from(sources, folder)
        found = load(folder, pieces)
        pieces.close()
        assert pieces.from_folder == 0 < pieces.from_neighbours
    pairs = list(zip(tensors_of(found), tensors_of(load(folder, None)), strict=True))
    assert len(pairs) > 5
    for (name, mine), (_, theirs) in pairs:
        assert torch.equal(mine.view(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), name


def test_logits_of_a_model_from_a_neighbour_are_bit_for_bit_those_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fp8(tmp_path)
    expected = logits_of(folder)
    with serving(Source(folder)) as sources:
        pieces = pieces_from(sources, folder)
        source_of_weights = build.WeightSource
        monkeypatch.setattr(
            build, "WeightSource", lambda *args, **more: source_of_weights(*args, **{**more, "pieces": pieces})
        )
        found = logits_of(folder)
        pieces.close()
    assert pieces.from_folder == 0 < pieces.from_neighbours
    assert torch.equal(found, expected)
