"""An E that sleeps with its cluster: the tower and the features go, and come back with the bits that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nursery import FORKED
from support.router_process import wait_until
from test_encode_cluster import QUESTION, ask, encoded
from test_role_change import ANY_PORTS
from test_sleep_cluster import operator, pools_of

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import ModelShape, make_model

pytestmark = pytest.mark.timeout(200)


def test_an_e_gives_tower_and_features_back_and_encodes_again_as_before(tmp_path: Path) -> None:
    make_model(tmp_path / "sees", "qwen3_vl", ModelShape())
    settings = [
        f"model.path={tmp_path / 'sees'}",
        "model.max_model_len=1024",
        "cache.num_pages=200",
        "dp_config.router.encode_schedulers=[{port: 0}, {port: 0}]",
        *ANY_PORTS,
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        for name in ("E0", "E1"):
            wait_until(lambda name=name: f"registered with {name}" in cluster.logs("P0"), 30, "P0 has registered")
        expected = ask(cluster, *QUESTION)
        wait_until(lambda: encoded(cluster) == 2, 10, lambda: str(encoded(cluster)))
        tower_bytes = 0
        for level in (1, 2):
            state: dict[str, Any] = operator(cluster, "/admin/sleep", level=level).json()
            freed = {each["instance"]: each["freed_bytes"] for each in state["instances"]}
            assert freed.keys() == {"P0", "D0", "E0", "E1"} and freed["E0"] > tower_bytes, "the tower stayed"
            assert not any(sum(pools_of(cluster.pid(name)).values()) for name in freed)
            tower_bytes = freed["E0"]
            assert ask(cluster, *QUESTION) == expected
            wait_until(lambda level=level: encoded(cluster) == 2 + 2 * level, 10, lambda: str(encoded(cluster)))
