"""Instances of a cluster that load their weights from each other: a P of two ranks and a D of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.models.config import model_hash
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
SIZES: dict[str, Any] = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": 500}
READ = re.compile(r"weights: (\d+) bytes from neighbours, (\d+) from the folder")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [make_model(base / f"m{seed}", seed=seed, **SIZES) for seed in range(2)]


@pytest.fixture(scope="module")
def cluster(folders: list[Path]) -> Iterator[LocalCluster]:
    settings = [f"model.path={folders[0]}", "model.served_name=m", "model.weights_from=neighbour"]
    settings += ["cache.num_pages=200", "scheduler.threads=1", "model.max_model_len=256"]
    settings += [f"dp_config.router.prefill_schedulers.0.{each}" for each in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def answers(cluster: LocalCluster) -> list[Any]:
    body = {"prompt": [[7 * at % 400 + 20 for at in range(40)], [5, 6, 7]], "max_tokens": 8, "temperature": 0}
    body |= {"logprobs": 3, "return_token_ids": True, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=120)
    assert reply.status_code == 200, reply.text
    return [(choice["token_ids"], choice["logprobs"]) for choice in reply.json()["choices"]]


def loads(cluster: LocalCluster, name: str) -> list[tuple[bool, bool]]:
    """Return, for each load of an instance's first rank since it started, whether bytes came from neighbours, and
    whether some came from the folder."""
    return [(int(one) > 0, int(other) > 0) for one, other in READ.findall(cluster.logs(name))]


def start_again(cluster: LocalCluster, name: str) -> None:
    cluster.kill(name)
    cluster.wait_exit(name)
    cluster.restart(name)
    cluster.wait_ready()


def test_instances_that_start_again_read_all_from_the_other_one(cluster: LocalCluster) -> None:
    before = answers(cluster)
    assert loads(cluster, "D0") == [(False, True)]  # nothing served these weights yet
    start_again(cluster, "D0")
    assert loads(cluster, "D0")[-1] == (True, False)
    assert answers(cluster) == before
    start_again(cluster, "P0")
    assert loads(cluster, "P0")[-2:] == [(True, False)] * 2  # both ranks
    assert answers(cluster) == before


def test_after_a_change_one_that_starts_again_reads_the_newest_weights_of_its_neighbour(
    cluster: LocalCluster, folders: list[Path]
) -> None:
    before = answers(cluster)
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    url, body = f"{cluster.url}/admin/weights", {"path": str(folders[1])}
    reply = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=120)
    assert reply.json()["model_hash"] == model_hash(folders[1]), reply.text
    changed = answers(cluster)
    assert changed != before
    count = len(loads(cluster, "D0"))
    start_again(cluster, "D0")
    wait_until(lambda: len(loads(cluster, "D0")) >= count + 2, 60, "D0 reads the newest weights")
    assert loads(cluster, "D0")[-2:] == [(False, True), (True, False)]
    assert answers(cluster) == changed
