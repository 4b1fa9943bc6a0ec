"""Members that share experts compute the logits of one process that has all of them. Ranks are threads here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_table import make_checkpoint
from engine_checkpoints import write_checkpoint
from nursery import popen
from support.checkpoints import ROWS
from wide_ranks import WideRanks, alone, ragged_script, worst_error

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
"""Bound on the error as a share of the largest logit."""
OWN = ("qwen3_moe", "deepseek_v3", "deepseek_v2_groups")
GENERIC = ("gpt-oss-20b", "GLM-4.5")


def compare(folder: Path, dp_size: int, tp_size: int = 1, way: str = "auto", seed: int = 3) -> WideRanks:
    """Run ragged scripts on a group, in which each member is idle at times, and compare all logits. Return the group,
    which is closed."""
    scripts = [ragged_script(rank, seed) for rank in range(dp_size)]
    wide = WideRanks(folder, dp_size, tp_size, way)  # type: ignore[arg-type]
    found = wide.run(scripts)
    wide.close()
    turns = {(c.computed + c.lent, c.empty) for c in (member.executor.counts for member in wide.members)}
    assert len(turns) == 1, "every member has had every turn"
    assert all(member.executor.counts.lent for member in wide.members)
    assert worst_error(found, alone(folder, scripts)) <= TOLERANCE
    return wide


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
@pytest.mark.parametrize("family", OWN)
def test_two_members_compute_the_logits_of_one_process(family: str, way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    compare(tmp_path, 2, way=way)


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2_groups"])
def test_four_members_compute_them(family: str, way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    compare(tmp_path, 4, way=way)


@pytest.mark.parametrize("family", OWN)
def test_two_members_of_two_tp_ranks_compute_them(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    wide = compare(tmp_path, 2, 2)
    held = [layer.mlp.experts.num_experts for model in wide.members[1].models for layer in model.layers[2:]]
    assert held == [2, 2]


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_experts_that_do_not_divide_are_held_unevenly(way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe_sparse")
    wide = compare(tmp_path, 2, way=way)
    held = [member.models[0].layers[1].mlp.experts.num_experts for member in wide.members]
    assert held == [2, 3]


@pytest.mark.parametrize("name", GENERIC)
def test_experts_of_the_modules_of_transformers_are_spread_too(name: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == name)
    make_checkpoint(row._replace(form=""), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config))
    compare(tmp_path, 2)
    compare(tmp_path, 3)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_compute_them_over_gloo_with_bells(size: int, tmp_path: Path) -> None:
    folder, meeting = tmp_path / "model", tmp_path / "meeting"
    write_checkpoint(folder, "qwen3_moe")
    outputs = [tmp_path / f"output{rank}" for rank in range(size)]
    members = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            argv = [sys.executable, "-m", "wide_process", str(rank), str(size), str(folder), str(meeting)]
            members.append(popen(argv, env=dict(os.environ), stdout=file, stderr=file))
    for member, output in zip(members, outputs, strict=True):
        assert member.wait(60) == 0, output.read_text()
    found = [torch.load(f"{meeting}.{rank}") for rank in range(size)]
    assert worst_error(found, alone(folder, [ragged_script(rank) for rank in range(size)])) <= TOLERANCE
    said = [[int(word) for word in output.read_text().split()] for output in outputs]
    assert len({(computed + lent, empty) for _, computed, lent, empty in said}) == 1
    assert said[1][2], "a member that was idle at the start has lent"
