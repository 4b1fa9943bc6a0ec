"""Members that share experts replay recorded decodes together. Here the twin records: the same function again, on the
same tensors, padded to the bucket of the fullest member. Ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_checkpoints import write_checkpoint
from wide_ranks import WideRanks, alone, ragged_script, worst_error

from chitu.engine.step_graphs import EagerRecorder, Recording, StepGraphs

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-5
DECODES = Recording(EagerRecorder(), decode_sizes=(1, 2, 4), prefill_sizes=())


def run(folder: Path, dp_size: int, tp_size: int = 1, num_scripts: int | None = None) -> float:
    """Return the worst error of ragged scripts on a group whose decodes are recorded."""
    scripts = [ragged_script(rank, steps=16) for rank in range(dp_size)]
    wide = WideRanks(folder, dp_size, tp_size, recording=DECODES)
    found = wide.run(scripts)
    wide.close()
    turns = [turn for turn in wide.turns if any(each.decode_rows for each in turn)]
    recorded = [turn for turn in turns if not any(each.prompt_rows for each in turn)]
    assert len(recorded) > 5 and any(not all(each.decode_rows for each in turn) for turn in recorded), "nobody is idle"
    sizes = {frozenset(runner._graphs._decodes) for member in wide.members for runner in member.runners}
    assert len(sizes) == 1 and len(*sizes) > 1, "the ranks have not recorded the same steps"
    return worst_error(found, alone(folder, scripts))


@pytest.mark.parametrize(("dp_size", "tp_size"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replays_give_the_logits_of_one_process(family: str, dp_size: int, tp_size: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    assert run(tmp_path, dp_size, tp_size) <= TOLERANCE


def test_experts_that_do_not_divide_are_replayed_unevenly(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe_sparse")
    assert run(tmp_path, 2) <= TOLERANCE


def test_tp_ranks_of_one_instance_replay_whole_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    script = ragged_script(0, steps=16)
    wide = WideRanks(tmp_path, 1, 2, recording=DECODES)
    found = wide.run([script])
    wide.close()
    assert worst_error(found, alone(tmp_path, [script])) <= TOLERANCE


def test_rows_that_pad_a_bucket_may_hold_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the scratch slot have token 0, which no prompt has."""
    write_checkpoint(tmp_path, "qwen3_moe")
    scripts = [ragged_script(rank, steps=16) for rank in range(2)]
    wide = WideRanks(tmp_path, 2, recording=DECODES)
    with torch.inference_mode():
        for member in wide.members:
            member.models[0].embedding.weight[0] = float("nan")
    padding = []

    def forward(graphs: StepGraphs, batch: object) -> torch.Tensor:
        hidden_TD = original(graphs, batch)
        padding.append(bool(hidden_TD.isnan().any()))
        return hidden_TD

    original = StepGraphs._forward
    monkeypatch.setattr(StepGraphs, "_forward", forward)
    found = wide.run(scripts)
    wide.close()
    assert any(padding), "no row was NaN"
    assert worst_error(found, alone(tmp_path, scripts)) <= TOLERANCE


def test_buckets_by_own_rows_alone_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    original = StepGraphs.decode
    monkeypatch.setattr(
        StepGraphs, "decode", lambda self, slots, positions, least_rows=0: original(self, slots, positions)
    )
    with pytest.raises(AssertionError, match="unlike numbers of rows"):
        run(tmp_path, 2)


def test_members_record_at_one_place_before_they_are_warm(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    wide = WideRanks(tmp_path, 2, recording=DECODES)
    for member in wide.members:
        member.executor._shapes = member.runners[0].shapes
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: member.executor._inner.record(True), wide.members, timeout=60))
    for member in wide.members:
        assert set(member.runners[0]._graphs._decodes) == {1, 2, 4, 8}
    wide.close()
