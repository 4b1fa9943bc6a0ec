"""A real 2P3D: every pair takes part, a late instance gets traffic, a drained one finishes and leaves.

Instances compute with the checksum engine: tokens are a function of the bytes that arrived, and a process starts in a
second. `test_pd_tp.py` checks tokens of the models over all pairs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import complete_all
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of
from chitu.config.load import dump_topology, load_topology
from chitu.config.topology import find_part, instances, on_one_host, router_ports, with_router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.plan import instance_spec
from chitu.launch.router_client import RouterClient
from chitu.process.child import ChildProcess

VERIFY = Path(__file__).parents[1] / "verify_xpyd_topology.py"

pytestmark = pytest.mark.timeout(420)
"""Timeout for eight processes that start on as few as two cores."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "m", EngineConfig(0.004, 0.0002))
    topology = on_one_host(load_topology("pd_disagg_2p3d_multi_node.yaml"))
    any_port = [f"{key}=0" for key in router_ports(topology.dp_config.router)]
    any_port += [f"{instance.key}.port=0" for instance in instances(topology)]
    sizes = ["model.max_model_len=1024", "cache.num_pages=500"]
    return [f"model.path={model}", "model.served_name=m", *sizes, *any_port]


@pytest.fixture(scope="module")
def cluster(settings: list[str]) -> Iterator[LocalCluster]:
    with LocalCluster(load_topology("pd_disagg_2p3d_multi_node.yaml", settings), entries=forked(ENTRIES)) as cluster:
        cluster.wait_ready(300)
        yield cluster


def verify(cluster: LocalCluster, *words: str) -> tuple[int, dict[str, Any]]:
    argv = [
        sys.executable,
        str(VERIFY),
        "--router",
        cluster.url,
        "--model",
        "m",
        "--concurrency",
        "6",
        "--json",
        *words,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def decoded_by(cluster: LocalCluster) -> list[str]:
    """Return the instances that decoded the requests that the router remembers, oldest first."""
    return [request.decode for request in RouterClient(cluster.url).cluster().requests]


def test_every_pair_takes_part_with_the_right_bytes_and_tokens(cluster: LocalCluster) -> None:
    code, verdict = verify(cluster, "--max_tokens", "24", "--stream")
    assert (code, verdict["reasons"]) == (0, [])
    pairs = {f"{pair['prefill']}-{pair['decode']}": pair["requests"] for pair in verdict["pairs"]}
    assert set(pairs) == {f"P{k}-D{m}" for k in range(2) for m in range(3)} and min(pairs.values()) >= 1
    assert sum(pairs.values()) == verdict["requests"]


def test_a_late_instance_gets_traffic_once_it_has_joined(
    cluster: LocalCluster, settings: list[str], tmp_path: Path
) -> None:
    """D3 is in no topology but its own."""
    topology = load_topology(
        "pd_disagg_2p3d_multi_node.yaml",
        [
            *settings,
            "dp_config.router.decode_schedulers.3.port=0",
            "dp_config.router.decode_schedulers.3.devices=[cpu]",
        ],
    )
    topology = with_router_ports(on_one_host(topology), cluster.ports)
    config = tmp_path / "late.yaml"
    config.write_text(dump_topology(topology), encoding="utf-8")
    spec = instance_spec(topology, find_part(topology, "D3"), str(config), [], 2, ENTRIES)
    env = {ENVIRONMENT_KEY: cluster_key_of(cluster.topology)}
    late = ChildProcess(spec, env, tmp_path / "D3.log", f"late-{time.time_ns()}/D3")
    served = threading.Event()
    try:
        while not served.wait(0.05):
            assert late.exit_code() is None, late.tail()
            complete_all(cluster.url, [[5, 6, 7]], [{"max_tokens": 2, "ignore_eos": True}])
            if "D3" in decoded_by(cluster):
                served.set()
        code, verdict = verify(cluster, "--max_tokens", "8")
        assert (code, verdict["reasons"], verdict["instances"]["D3"] > 0) == (0, [], True)
    finally:
        late.terminate()
        wait_until(lambda: late.exit_code() is not None, 10.0, late.tail)
        late.kill_tree()
    wait_until(
        lambda: "D3" not in {i.name for i in RouterClient(cluster.url).cluster().instances},
        5.0,
        lambda: "a late instance that left is no part of the topology",
    )


def test_a_drained_decode_instance_finishes_what_runs_and_the_check_names_it(cluster: LocalCluster) -> None:
    options = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
    expected = complete_all(cluster.url, [[9, 8, 7]], [options])[0].token_ids
    answers: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(complete_all(cluster.url, [[9, 8, 7]], [options])[0].token_ids))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    client = RouterClient(cluster.url)
    wait_until(
        lambda: any(r.decode == "D1" and r.ended_at_s is None for r in client.cluster().requests),
        10.0,
        lambda: client.cluster().requests,
    )
    argv = [sys.executable, "-m", "chitu.cli", "drain", "D1", "--url", cluster.url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "D1 has left" in done.stdout, done.stdout + done.stderr
    for thread in threads:
        thread.join(60)
    assert answers == [expected] * 6, "nobody's answer was cut"
    cluster.wait_exit("D1", 60.0)
    assert cluster.members["D1"].exit_code == 0 and cluster.members["D1"].has_left
    before = len(decoded_by(cluster))
    complete_all(cluster.url, [[1, 2]] * 6, [{"max_tokens": 2}] * 6)
    assert "D1" not in decoded_by(cluster)[-6:] and before
    code, verdict = verify(cluster, "--max_tokens", "8", "--stream")
    assert (code, verdict["reasons"]) == (1, ["D1 is down"])
    assert httpx.get(f"{cluster.url}/health", trust_env=False, timeout=60.0).status_code == 200


def test_a_killed_one_is_named_too_until_it_is_back(cluster: LocalCluster) -> None:
    cluster.restart("D1")
    cluster.wait_ready(200)
    cluster.kill("D2")
    cluster.wait_exit("D2", 60.0)
    code, verdict = verify(cluster, "--max_tokens", "8")
    assert code == 1 and any(reason.startswith("D2 is ") or "D2" in reason for reason in verdict["reasons"])
    cluster.restart("D2")
    cluster.wait_ready(200)
    code, verdict = verify(cluster, "--max_tokens", "8")
    assert (code, verdict["reasons"]) == (0, [])
