"""E with every kind of instance that computes prompts, and more than one of each: what the rows of a prompt give, and
the tokens, are those of `transformers`, and no image was encoded where the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import FORKED
from support.router_process import wait_until
from test_image_cluster import (
    PD,
    TURNS,
    Reference,
    ask_all,
    asked,
    make_experts,
    require_right,
)
from test_role_change import client

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)

ROUTER = "dp_config.router"
KINDS = ["tp", "unified", "mooncake"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vl"
    make_model(folder, family="qwen3_vl", layers=3, hidden_size=64, heads=4, kv_heads=2, vocab_size=600)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_experts(model, tmp_path_factory.mktemp("models") / "moe") if kind == "tp" else model


@pytest.fixture(scope="module")
def reference(served: Path) -> Reference:
    return Reference(served)


def settings_of(folder: Path) -> list[str]:
    shape = ["cache.num_pages=600", "scheduler.chunk_size=37", "model.max_model_len=2048"]
    return [f"model.path={folder}", "model.served_name=m", *shape, f"{ROUTER}.encode_schedulers=[{{port: 0}}]"]


@pytest.fixture(scope="module")
def cluster(kind: str, served: Path) -> Iterator[LocalCluster]:
    settings = settings_of(served)
    name = "unified_local.yaml" if kind == "unified" else "pd_disagg_1p1d_local.yaml"
    if kind == "mooncake":
        pytest.importorskip("mooncake.engine")
        settings.append(f"{PD}.transport=mooncake")
    elif kind == "tp":
        settings += [f"{ROUTER}.prefill_schedulers.0.{field}" for field in ("tp_size=2", "devices=[cpu,cpu]")]
    with LocalCluster(load_topology(name, settings), entries=FORKED) as cluster:
        cluster.wait_ready(120)
        yield cluster


def loads(cluster: LocalCluster) -> dict[str, Any]:
    return {each.name: each.load for each in client(cluster).cluster().instances if each.status == "up"}


def num_encoded(cluster: LocalCluster, *names: str) -> int:
    """Return how many images the instances have encoded whose names begin so."""
    return sum(load.images for name, load in loads(cluster).items() if name.startswith(names))


def computing(cluster: LocalCluster) -> list[str]:
    return [name for name in cluster.names if name[0] in "PU"]


def wait_registered(cluster: LocalCluster) -> None:
    """Wait until every instance that computes prompts may ask every E."""
    names = list(loads(cluster))
    for name in names:
        for encoder in [each for each in names if each[0] == "E" and name[0] in "PU"]:
            wait_until(
                lambda n=name, e=encoder: f"registered with {e}" in cluster.logs(n), 30, f"{name} with {encoder}"
            )


def test_rows_and_tokens_are_right_with_what_e_encodes(cluster: LocalCluster, reference: Reference) -> None:
    wait_registered(cluster)
    answers = ask_all(cluster.url, [asked(messages, prompt_logprobs=2) for messages in TURNS])
    for messages, answer in zip(TURNS, answers, strict=True):
        require_right(reference, messages, answer)
    wait_until(lambda: num_encoded(cluster, "E") == 4, 10, lambda: str(loads(cluster)))
    assert num_encoded(cluster, "P", "U") == 0
