"""`POST /admin/profile`: instances of a running cluster write what each rank computes, while they answer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import httpx
import pytest
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_calls import credential
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
SIZES = ["cache.num_pages=64", "model.max_model_len=256", "scheduler.threads=1"]
TWO_RANKS = [f"dp_config.router.prefill_schedulers.0.{key}" for key in ("tp_size=2", "devices=[cpu,cpu]")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def post(url: str, path: str, /, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {credential(url)}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, trust_env=False, timeout=60)


def tokens(url: str) -> list[int]:
    prompt = list(range(300, 340))
    fields = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, "temperature": 0, "ignore_eos": True}
    reply = post(url, "/v1/completions", **fields)
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def operators(path: Path) -> set[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("aten::")}


@pytest.mark.by_hand
def test_each_rank_writes_a_file_and_the_answers_stay(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    settings = [f"model.path={model}", f"trace.profile_dir={folder}", *SIZES, *TWO_RANKS]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        url = cluster.url
        expected = tokens(url)
        assert not folder.exists(), "nothing is written unless it is asked for"
        for body, status in (
            ({"target": "P7"}, 404),
            ({"target": "P0", "steps": 0}, 400),
            ({"target": "P0", "steps": 1001}, 400),
            ({"target": "P0", "seconds": 61}, 400),
            ({"target": "P0", "seconds": 0}, 400),
            ({"target": "P0", "path": "/tmp/x"}, 400),
            ({}, 400),
        ):
            assert post(url, "/admin/profile", **body).status_code == status, body
        asked = post(url, "/admin/profile", target="prefill", seconds=3, steps=1000).json()
        assert asked["instances"] == ["P0"]
        busy = post(url, "/admin/profile", target="decode")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "in_use")
        assert tokens(url) == expected
        files = [folder / f"{asked['label']}-P0.{rank}.trace.json.gz" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() for file in files), 60, "the file of each rank")
        assert sorted(folder.iterdir()) == files
        seen = [operators(file) for file in files]
        assert all("aten::_scaled_dot_product_flash_attention_for_cpu" in each for each in seen), seen
        assert tokens(url) == expected

        wait_until(lambda: post(url, "/admin/profile", target="D0", steps=2).is_success, 10, "the first one's time")
        assert tokens(url) == expected
        wait_until(lambda: len([*folder.glob("*-D0.0.trace.json.gz")]) == 1, 60, "the file of D")


def test_no_folder_no_profile(model: Path) -> None:
    settings = [f"model.path={model}", *SIZES]
    with LocalCluster(load_topology("unified_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        refused = post(cluster.url, "/admin/profile", target="U0")
        assert refused.status_code == 400 and "trace.profile_dir" in refused.json()["error"]["message"]
