"""Revisions on a real 2P2D: requests stay within one, and `chitu canary` moves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from nursery import FORKED

from chitu import cli
from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive
from chitu.protocol.admin import Canary

ROUTER = "dp_config.router"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = [
        f"model.path={TINY_MODEL_DIR}",
        "cache.num_pages=200",
        "scheduler.threads=1",
        f"{ROUTER}.policy=round_robin",
    ]
    both = "[{port: 0, revision: blue}, {port: 0, revision: green}]"
    settings += [f"{ROUTER}.{role}_schedulers={both}" for role in ("prefill", "decode")]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def served(cluster: LocalCluster, count: int = 12) -> Counter[str]:
    """Send requests and return how many each pair served."""
    found = Counter[str]()
    for number in range(count):
        body = {"model": "chitu-tiny", "prompt": [5 + number, 6, 7], "max_tokens": 2}
        body |= {"return_proof": True, "return_receipt": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
        assert "chitu" in answer, answer
        receipt = answer["chitu"]["receipt"]
        assert receipt["revision"] == {"0": "blue", "1": "green"}[receipt["served"][-1][-1]]
        found[receipt["served"][-1]] += 1
    return found


def test_pairs_are_of_one_revision_and_an_operator_moves_the_requests(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    client = RouterClient(cluster.url, secrets.token)
    assert {one.name: one.revision for one in client.cluster().instances} == {
        **{"P0": "blue", "D0": "blue"},
        **{"P1": "green", "D1": "green"},
    }
    assert set(served(cluster, 24)) == {"P0-D0", "P1-D1"}
    assert client.set_canary(Canary("green", 1.0)) == Canary("green", 1.0) == client.cluster().canary
    assert served(cluster) == {"P1-D1": 12}
    assert cli.main(["canary", "green", "0%", "--url", cluster.url]) == 0
    assert "0% of the requests go to revision green" in capsys.readouterr().out
    assert served(cluster) == {"P0-D0": 12}
    assert cli.main(["canary", "red", "10%", "--url", cluster.url]) == 1
    assert "no instance has the revision 'red'; there are blue, green" in capsys.readouterr().err
    assert cli.main(["canary", "--url", cluster.url]) == 0
    assert client.cluster().canary is None
    page = httpx.get(f"{cluster.url}/metrics", trust_env=False, timeout=60.0).text
    assert 'chitu_instance_info{instance="P1",release="' in page and 'revision="green",role="prefill"} 1.0' in page


def test_a_lost_revision_hands_its_requests_to_the_other(cluster: LocalCluster) -> None:
    cluster.kill("D1")
    cluster.wait_exit("D1")
    assert served(cluster, 8) == {"P0-D0": 8}
