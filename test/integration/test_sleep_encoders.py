"""E sleep with their cluster: the tower and the features go, and come back with the bits that they had. Members of a
group do not sleep, and then nobody does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nursery import WITH_TRANSFORMERS
from support.router_process import wait_until
from test_encode_cluster import QUESTION, ask, encoded
from test_member_groups import started
from test_role_change import ANY_PORTS
from test_sleep_cluster import complete, operator, pools_of, statuses

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
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=WITH_TRANSFORMERS) as cluster:
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
            operator(cluster, "/admin/wake")  # a request wakes them, too, and P encodes for itself if it is awake first
            wait_until(lambda: set(statuses(cluster).values()) == {"up"}, 30, lambda: str(statuses(cluster)))
            assert ask(cluster, *QUESTION) == expected
            wait_until(lambda level=level: encoded(cluster) == 2 + 2 * level, 10, lambda: str(encoded(cluster)))


def test_members_of_a_group_are_named_and_nobody_sleeps(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "wide", "qwen3_moe", layers=2, max_position_embeddings=512, hidden_size=64)
    with started(folder, ["{devices: [cpu]}"], ["{dp_size: 2, experts: spread, devices: [cpu, cpu]}"]) as cluster:
        cluster.wait_ready(120)
        prompts = [[7] * 40]
        expected = complete(cluster, prompts)
        refused = operator(cluster, "/admin/sleep", level=2)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "sleep_refused", refused.text
        assert "D0: members of a group (dp_size) do not sleep" in refused.json()["error"]["message"]
        assert set(statuses(cluster).values()) == {"up"} and complete(cluster, prompts) == expected
        assert operator(cluster, "/admin/wake").json()["level"] == 0
