"""Cells of the chaos matrix (`test_chaos.py`) with staged transfers: a process dies, freezes or is cut off while groups
are in segments, and every request of a 2P2D is still right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_cluster import Blow, ChaosCluster
from support.steady_load import RIGHT
from test_chaos import Row, run_cell

PD = "dp_config.router.pd_disaggregation"
STAGED = [f"{PD}.transfer=staged", f"{PD}.staging_mb=4", f"{PD}.staging_segment_mb=1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with ChaosCluster(tmp_path_factory.mktemp("chaos"), *STAGED) as cluster:
        yield cluster


@pytest.mark.parametrize(("blow", "target"), [("SIGKILL", "P0"), ("SIGKILL", "D0"), ("SIGSTOP", "P0"), ("cut", "D0")])
def test_staged_requests_survive_or_are_tried_again(cluster: ChaosCluster, blow: Blow, target: str) -> None:
    row = Row(blow, target, "transferring")
    run_cell(cluster, row)
    assert set(row.outcomes) == {RIGHT}, "\n".join(row.details)
    assert row.leaked == 0
    loads = cluster.loads()
    assert not [name for name, load in loads.items() if load.suspended]
    assert all(load.bytes_moved > 0 for name, load in loads.items() if name.startswith("P"))
