"""The logits of every checkpoint of the list that loads: undivided = 1P1D = `transformers`, however the prompt is cut
into chunks and the heads among ranks, and whatever happens to a sequence between two tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_table import (
    TOLERANCE,
    divided,
    error_of,
    make_checkpoint,
    prompts,
    undivided,
)
from support.checkpoints import ROWS, Row

pytestmark = pytest.mark.usefixtures("one_thread")
SERVED = [row for row in ROWS if not row.refused]
CUT = [row for row in SERVED if row.name in ("Qwen3-32B", "DeepSeek-V3-bf16", "Qwen3-30B-A3B")]


@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.name)
def test_undivided_and_pd_give_the_logits_of_transformers(row: Row, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(row, tmp_path)
    one_by_one = prompts([40])
    errors = {
        "chunks of 1": error_of(checkpoint, undivided(tmp_path, one_by_one, 1)),
        "whole prompts": error_of(checkpoint, undivided(tmp_path, prompts(), 1024)),
        "1P1D, chunks of 37": error_of(checkpoint, divided(tmp_path, prompts(), 37)),
    }
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["1to2", "2to1"])
@pytest.mark.parametrize("row", CUT, ids=lambda row: row.name)
def test_heads_that_both_sides_cut_differently_change_no_logits(
    row: Row, sizes: tuple[int, int], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(row, tmp_path)
    assert error_of(checkpoint, divided(tmp_path, prompts(), 37, sizes)) < TOLERANCE
