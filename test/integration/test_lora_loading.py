"""An adapter that is loaded while a model serves gives the very logits of one that was there at the start: our own code
on one rank and on two, P and D, the modules of transformers. What cannot take one is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_table import Adapted, Answers, Instance, Link, divided_by, instances, undivided, undivided_by
from support.checkpoints import ROWS
from test_lora import (
    CHOSEN,
    Base,
    copied,
    four_prompts,
    generic_layer,
    linear_layers,
    make_base,
    make_checkpoint,
    write_adapter,
)
from thread_ranks import Ranks

from chitu.engine.weights import RankWeights, WeightsSource
from chitu.engine.weights_loader import AdapterFolder, ReadWeights
from chitu.models.config import read_model_spec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("qwen3"), "qwen3")


def weights_of(instance: Instance, folder: Path, **more: Any) -> list[RankWeights]:
    """Return what loads adapters on each rank."""
    spec = read_model_spec(folder, 1024)
    source = WeightsSource(str(folder), spec, lambda path, found: pytest.fail("the model itself is read"), **more)
    runners = instance.engine.runners if isinstance(instance.engine, Ranks) else [instance.engine.runner]
    return [RankWeights(source, runner) for runner in runners]


def load(instance: Instance, folder: Path, adapters: Mapping[str, str], first: int = 1, **more: Any) -> ReadWeights:
    """Load adapters on all ranks, with numbers from `first` on. Return what the last one has read."""
    read = ReadWeights()
    for weights in weights_of(instance, folder, **more):
        names = enumerate(sorted(adapters), first)
        weights.begin("", [AdapterFolder(number, name, adapters[name]) for number, name in names])
        if (read := weights.wait()).error:
            return read
        weights.change()
    return read


def same(found: Answers, wanted: Answers) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(one[1] == other[1] and torch.equal(one[2], other[2]) for one, other in pairs)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_loaded_later_has_the_same_logits_and_leaves_those_of_the_base(base: Base, size: int) -> None:
    folder, asked = base.source.folder, four_prompts()
    wanted, plain = (undivided(source, asked, 37, size) for source in (base.source, folder))
    instance = Instance(Adapted(folder, {}, {}), size)
    with instances(instance):
        assert same(undivided_by(instance, asked, 37), plain)
        assert len(load(instance, folder, base.folders).adapters) == 2
        assert same(undivided_by(instance, asked, 37), plain), "rows without an adapter"
        instance.engine.chosen = CHOSEN
        assert same(undivided_by(instance, asked, 37), wanted) and not same(wanted, plain)
        load(instance, folder, {"tone": base.folders["tone"]}, 7)
        for weights in weights_of(instance, folder):
            weights.unload(2)
        instance.engine.chosen = {slot: 7 if number == 2 else number for slot, number in CHOSEN.items()}
        assert same(undivided_by(instance, asked, 37), wanted)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=str)
def test_p_and_d_have_the_same_logits_with_what_they_load_later(base: Base, sizes: tuple[int, int]) -> None:
    folder, asked, found = base.source.folder, four_prompts(), list[Answers]()
    for adapters in (base.folders, {}):
        source = Instance(Adapted(folder, adapters, CHOSEN), sizes[0], sampling=False)
        target = Instance(Adapted(folder, adapters, CHOSEN), sizes[1])
        with instances(source, target):
            if not adapters:
                load(source, folder, base.folders)
                load(target, folder, base.folders)
            for mine, theirs in zip(source.pools, target.pools, strict=False):
                assert mine.layout.adapters == theirs.layout.adapters
            way = Link(source, target)
            found.append(divided_by(source, target, way, asked, 37))
            way.close()
    assert same(*found)


@pytest.mark.parametrize("name", ["OLMo-2-1124-13B-Instruct", "GLM-4-9B-0414", "Mixtral-8x7B-v0.1"])
def test_modules_of_transformers_take_adapters_later(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a gated MLP whose gate and up are computed together, too."""
    checkpoint = make_checkpoint(next(row for row in ROWS if row.name == name), tmp_path / "model")
    asked = four_prompts()
    layers = {each: part for each, part in linear_layers(checkpoint.reference).items() if ".layers." in each}
    targets = sorted({each.rpartition(".")[2] for each in layers if generic_layer(each)})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
    write_adapter(tmp_path / "any", config, layers, generic_layer)
    adapters, chosen = {"any": str(tmp_path / "any")}, {1: 1, 3: 1}
    caplog.set_level("INFO")
    wanted = undivided(Adapted(checkpoint.folder, adapters, chosen), asked, 37)
    instance = Instance(Adapted(checkpoint.folder, {}, {}))
    assert ("gated MLPs" in caplog.text) == name.startswith("OLMo")
    with instances(instance):
        plain = undivided_by(instance, asked, 37)
        assert not load(instance, checkpoint.folder, adapters).error
        assert same(undivided_by(instance, asked, 37), plain)
        instance.engine.chosen = chosen
        assert same(undivided_by(instance, asked, 37), wanted) and not same(wanted, plain)
        weights_of(instance, checkpoint.folder)[0].unload(1)
        instance.engine.chosen = {}
        assert same(undivided_by(instance, asked, 37), plain)


def test_what_takes_none_says_why_and_what_is_bad_leaves_nothing(base: Base, tmp_path: Path) -> None:
    instance, folder = Instance(Adapted(base.source.folder, {}, {})), base.source.folder
    bad = copied(base, tmp_path)
    (bad / "adapter_model.safetensors").write_bytes(b"0" * 100)
    with instances(instance):
        for more, adapters, words in (
            ({"no_adapters": "(scheduler.lanes is 2)"}, base.folders, "model.adapters.sql: (scheduler.lanes is 2)"),
            ({}, {"sql": str(bad), "tone": base.folders["tone"]}, "model.adapters.sql: "),
            ({}, {"tone": str(tmp_path / "nowhere")}, "does not exist"),
        ):
            read = load(instance, folder, adapters, **more)
            assert words in read.error and not read.adapters
        assert not instance.engine.runner.model.adapters.low_ranks  # type: ignore[attr-defined]
