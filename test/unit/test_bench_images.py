"""What `chitu bench images` starts, and the tower of the model that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chitu.config.load import load_topology
from chitu.config.topology import instances
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.tools.bench import images
from chitu.tools.make_model import make_model


@pytest.mark.parametrize("cores", [(3, 7), (0, 1, 2, 5)])
def test_e_has_a_core_of_its_own_and_one_setup_gives_that_core_to_p(cores: tuple[int, ...]) -> None:
    setups = images.setups_of(cores, ())
    p, e = map(str, cores[:2])
    assert [(each.places.get("P0"), each.places.get("E0")) for each in setups] == [
        (p, None),
        (f"{p},{e}", None),
        (p, e),
    ]
    assert p not in {core for each in setups for core in each.places["rest"].split(",")}
    for setup in setups:
        topology = load_topology("pd_disagg_1p1d_local", setup.settings())
        assert not list(problems(topology, need_model=False))
        found = {each.name: each.config for each in instances(topology)}
        assert ("E0" in found) == setup.has_e
        assert found["P0"].threads == len(setup.places["P0"].split(",")) and found["P0"].devices == ("cpu",)


def test_devices_are_those_that_are_named_and_no_core_is_bound() -> None:
    one, two = images.setups_of((0,), ("cuda:0", "cuda:1", "cuda:2"))
    assert "rest" not in one.places | two.places and not one.has_e
    topology = load_topology("pd_disagg_1p1d_local", two.settings())
    assert [each.config.devices for each in instances(topology)] == [("cuda:0",), ("cuda:1",), ("cuda:2",)]


def test_one_core_is_too_few() -> None:
    with pytest.raises(ConfigError, match="one core"):
        images.setups_of((0,), ())


def test_processes_of_a_tree_are_found_and_bound() -> None:
    core = str(min(os.sched_getaffinity(0)))
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        (child,) = images._below(process.pid)
        images._bind(child, core)
        assert os.sched_getaffinity(child) == {int(core)}
        process.stdin.close()


def test_images_and_prompts_are_the_same_for_each_cluster_and_never_come_twice() -> None:
    one, two = images.MixedRequests(64, 3), images.MixedRequests(64, 3)
    sent = [json.dumps(make()) for make in (one.text, one.image, one.image, one.text)]
    assert sent == [json.dumps(make()) for make in (two.text, two.image, two.image, two.text)]
    assert len(set(sent)) == 4


def test_a_tower_has_the_size_that_it_is_given(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_vl", tower_size=96, tower_depth=4, max_pixels=4096)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    assert (vision["hidden_size"], vision["depth"]) == (96, 4)
    assert json.loads((folder / "preprocessor_config.json").read_text())["size"]["longest_edge"] == 4096


@pytest.mark.parametrize("sizes", [{"tower_size": 40}, {"tower_depth": 1}, {"max_pixels": 1000}])
def test_a_tower_that_cannot_be_is_refused_by_name(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        make_model(tmp_path / "model", "qwen3_vl", **sizes)


def test_each_figure_has_a_column_of_its_own() -> None:
    (one, *_) = images.setups_of((0, 1), ())
    one.times.alone, one.times.text, one.times.image = [0.01], [0.02, 0.04], [0.5]
    one.rates = [3.0]
    row = dict(zip(images.COLUMNS, images.row_of(one, "P0 1"), strict=True))
    assert len(row) == len(images.COLUMNS)
    assert (row["alone p99"], row["beside images p50"], row["image p99"]) == (10, pytest.approx(30), 500)
