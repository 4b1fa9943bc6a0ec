"""Members that share experts compute the logits of one process that has all of them. Ranks are threads here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_table import make_checkpoint
from engine_checkpoints import write_checkpoint
from nursery import popen_with_transformers
from support.checkpoints import ROWS
from test_lora import make_base
from thread_ranks import Meeting
from wide_ranks import Member, ThreadLinks, WideRanks, alone, ragged_script, worst_error

from chitu.engine.build import load_model
from chitu.engine.executor import Shapes, StepSizes
from chitu.engine.expert_group import ExpertGroup
from chitu.errors import Internal, UnsupportedModel
from chitu.ops.interface import Routes

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
"""Bound on the error as a share of the largest logit."""
OWN = ("qwen3_moe", "deepseek_v3", "deepseek_v2_groups", "gpt_oss")
ONE_WAY = {"deepseek_v3": "all_to_all", "deepseek_v2_groups": "gather", "gpt_oss": "all_to_all"}
"""The way of rows that CI has of families beside the first, with which both are computed."""
GENERIC = [
    "GLM-4.5",
    *(
        pytest.param(name, marks=pytest.mark.by_hand)
        for name in ("Qwen3-Next-80B-A3B-Instruct", "Mixtral-8x7B-v0.1", "granite-4.0-h-small", "Kimi-Linear-48B-A3B")
    ),
]


def compare(folder: Path, dp_size: int, tp_size: int = 1, way: str = "auto", seed: int = 3) -> WideRanks:
    """Run ragged scripts on a group, in which each member is idle at times, and compare all logits. Return the group,
    which is closed."""
    scripts = [ragged_script(rank, seed) for rank in range(dp_size)]
    wide = WideRanks(folder, dp_size, tp_size, way)  # type: ignore[arg-type]
    found = wide.run(scripts)
    wide.close()
    turns = {(c.computed + c.lent, c.empty) for c in (member.executor.counts for member in wide.members)}
    assert len(turns) == 1, "every member has had every turn"
    assert dp_size == 1 or all(member.executor.counts.lent for member in wide.members)
    assert worst_error(found, alone(folder, scripts)) <= TOLERANCE
    return wide


def in_ci(families: Sequence[str], *chosen: str) -> list[Any]:
    """Return families as parameters, those that are not chosen by hand."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.by_hand) for name in families]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(name, way, marks=() if ONE_WAY.get(name, way) == way else pytest.mark.by_hand)
        for name in OWN
        for way in ("gather", "all_to_all")
    ],
)
def test_two_members_compute_the_logits_of_one_process(family: str, way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    compare(tmp_path, 2, way=way)


def test_bytes_that_move_follow_the_formula(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    num_layers, hidden, per_row, number_bytes = 2, 64, 3, 4
    sent = {}
    for way in ("gather", "all_to_all"):
        wide = compare(tmp_path, 3, way=way)
        sent[way] = {member.links[0].bytes_sent for member in wide.members}
        longest = [max(turn.prompt_rows + turn.decode_rows for turn in turns) for turns in wide.turns]
        row_bytes = (hidden + 2 * per_row + hidden) * number_bytes
        if way == "gather":
            assert sent[way] == {num_layers * sum(longest) * (3 - 1) * row_bytes}
    assert max(sent["all_to_all"]) < max(sent["gather"])


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3_moe", "gather"),
        ("deepseek_v2_groups", "all_to_all"),
        pytest.param("qwen3_moe", "all_to_all", marks=pytest.mark.by_hand),
        pytest.param("deepseek_v2_groups", "gather", marks=pytest.mark.by_hand),
    ],
)
def test_four_members_compute_them(family: str, way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    compare(tmp_path, 4, way=way)


@pytest.mark.parametrize("family", in_ci(OWN, "deepseek_v3", "gpt_oss"))
def test_two_members_of_two_tp_ranks_compute_them(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    wide = compare(tmp_path, 2, 2)
    held = [layer.mlp.experts.num_experts for model in wide.members[1].models for layer in model.layers[2:]]
    assert held == [2, 2]


def test_rows_with_lora_adapters_pass_the_same_experts(tmp_path: Path) -> None:
    adapted = make_base(tmp_path, "qwen3_moe").source
    scripts = [ragged_script(rank) for rank in range(2)]
    for tp_size in (1, 2):
        wide = WideRanks(adapted.folder, 2, tp_size, adapted=adapted)
        found = wide.run(scripts)
        wide.close()
        assert worst_error(found, alone(adapted.folder, scripts, adapted)) <= TOLERANCE
    assert worst_error(found, alone(adapted.folder, scripts)) > TOLERANCE


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_experts_that_do_not_divide_are_held_unevenly(way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe_sparse")
    wide = compare(tmp_path, 2, way=way)
    held = [member.models[0].layers[1].mlp.experts.num_experts for member in wide.members]
    assert held == [2, 3]


@pytest.mark.parametrize("family", in_ci(OWN, "qwen3_moe", "deepseek_v2_groups"))
def test_tp_ranks_of_one_instance_hold_whole_experts_too(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    script, wide = ragged_script(0), WideRanks(tmp_path, 1, 2)
    found = wide.run([script])
    wide.close()
    assert worst_error(found, alone(tmp_path, [script])) <= TOLERANCE


def test_members_whose_warm_ups_differ_are_warm_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    wide = WideRanks(tmp_path, 2)
    few, many = (Shapes(256, 16, True, 8, prompts=prompts) for prompts in ((), ((5,), (17,))))
    for member, shapes in zip(wide.members, (few, many), strict=True):
        member.executor._shapes = shapes
    warm = [False, False]

    def work(member: Member) -> None:
        member.executor.warmup()
        warm[member.data_rank] = True
        member.lend_while(lambda: not all(warm) or member.executor.must_step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, wide.members, timeout=60))
    counts = [member.executor.counts for member in wide.members]
    assert counts[0].computed < counts[1].computed and counts[0].lent
    assert counts[0].computed + counts[0].lent == counts[1].computed + counts[1].lent
    wide.close()


def test_padding_is_not_computed_whatever_it_holds() -> None:
    """Two ranks with two experts each and rows of one number; what stands behind a rank's rows comes as NaN."""

    class Padding(ThreadLinks):
        def all_gather(self, x_RC: torch.Tensor) -> torch.Tensor:
            found = super().all_gather(x_RC)
            found[1:3, :1] = torch.nan  # the row; its experts are 0, which rank 0 has
            return found

    meeting, sizes = Meeting(2), [StepSizes(decode_rows=1), StepSizes(decode_rows=3)]

    def work(rank: int) -> torch.Tensor:
        def compute(x_TD: torch.Tensor, routes: Routes) -> torch.Tensor:
            assert x_TD.isfinite().all() and routes.weights_TA.isfinite().all()
            factor_T = 2.0 * rank + routes.experts_TA[:, 0] + 1
            return x_TD * routes.weights_TA * factor_T.unsqueeze(1)

        group = ExpertGroup(Padding(meeting, rank), way="gather")
        group.begin(sizes)
        rows = sizes[rank].rows
        routes = Routes(torch.tensor([[0, 3]] * rows), torch.tensor([[1.0, 10.0]] * rows))
        return group.mixture(torch.arange(1.0, rows + 1).unsqueeze(1), routes, 4, compute)

    with ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(work, range(2), timeout=60)
    assert mine.tolist() == [[41.0]] and theirs.tolist() == [[41.0], [82.0], [123.0]]


def test_a_step_of_other_sizes_than_agreed_is_refused(tmp_path: Path) -> None:
    group = ExpertGroup(ThreadLinks(Meeting(2), 0))
    group.begin([StepSizes(decode_rows=1), StepSizes(decode_rows=1)])
    routes = Routes(torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1))
    with pytest.raises(Internal, match="2 rows of member 0"):
        group.mixture(torch.zeros(2, 4), routes, 4, lambda x, routes: x)


def test_experts_in_a_form_that_is_not_known_are_refused(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "Llama-4-Scout-17B-16E-Instruct")
    make_checkpoint(row._replace(form=""), tmp_path)
    with pytest.raises(UnsupportedModel, match="experts is spread: Llama4ForConditionalGeneration has no experts"):
        load_model(tmp_path, "float32", spread=ExpertGroup(ThreadLinks(Meeting(2), 0)))


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


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.by_hand)])
def test_processes_compute_them_over_gloo_with_bells(size: int, tmp_path: Path) -> None:
    folder, meeting = tmp_path / "model", tmp_path / "meeting"
    write_checkpoint(folder, "qwen3_moe")
    outputs = [tmp_path / f"output{rank}" for rank in range(size)]
    members = []
    for rank, output in enumerate(outputs):
        with output.open("wb") as file:
            argv = [sys.executable, "-m", "wide_process", str(rank), str(size), str(folder), str(meeting)]
            members.append(popen_with_transformers(argv, env=dict(os.environ), stdout=file, stderr=file))
    for member, output in zip(members, outputs, strict=True):
        assert member.wait(150) == 0, output.read_text()
    found = [torch.load(f"{meeting}.{rank}") for rank in range(size)]
    assert worst_error(found, alone(folder, [ragged_script(rank) for rank in range(size)])) <= TOLERANCE
    said = [[int(word) for word in output.read_text().split()] for output in outputs]
    assert len({(computed + lent, empty) for _, computed, lent, empty in said}) == 1
    assert said[1][2], "a member that was idle at the start has lent"
