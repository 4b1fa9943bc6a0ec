"""Members that share experts compute the logits of one process that has all of them. Ranks are threads here."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_checkpoints import write_checkpoint
from wide_ranks import WideRanks, alone, ragged_script, worst_error

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5


@pytest.mark.parametrize("way", ["gather", "all_to_all", "auto"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2_groups", "qwen3_moe_sparse"])
def test_two_members_compute_the_logits_of_one_process(family: str, way: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    scripts = [ragged_script(rank) for rank in range(2)]
    wide = WideRanks(tmp_path, 2, way=way)  # type: ignore[arg-type]
    found = wide.run(scripts)
    for m in wide.members:
        print(m.executor.counts, m.wave.number)
    wide.close()
    err = worst_error(found, alone(tmp_path, scripts))
    print(err)
    assert err <= TOLERANCE
