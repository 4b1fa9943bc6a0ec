"""1E1P1D with the engine on CPUs: what E encodes, P computes with as with what it encodes itself."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from nursery import FORKED
from support.image_files import image_file
from support.router_process import wait_until
from test_role_change import ANY_PORTS, client

from chitu.config.load import load_topology
from chitu.errors import RequestError, RoleRefused
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import ModelShape, make_model
from chitu.types import Role

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("model") / "sees"
    make_model(folder, "qwen3_vl", ModelShape())
    settings = [
        f"model.path={folder}",
        "model.max_model_len=1024",
        "cache.num_pages=200",
        "scheduler.max_running_requests=8",
        "dp_config.router.pd_disaggregation.verify_kv=all",
        "dp_config.router.encode_schedulers=[{port: 0}]",
        *ANY_PORTS,
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def part_of(seed: int, width: int, height: int) -> dict[str, Any]:
    data = base64.b64encode(image_file(width, height, seed=seed)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(cluster: LocalCluster, *content: dict[str, Any] | str) -> tuple[str, list[float]]:
    """Return the answer, and the logprob of each prompt token."""
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 12,
        "temperature": 0.0,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    }
    reply = msgspec.json.decode(client(cluster).post("/v1/chat/completions", body, 90)[1])
    found = reply["prompt_logprobs"]
    logprobs = [max(each["logprob"] for each in place.values()) for place in found if place]
    return reply["choices"][0]["message"]["content"], logprobs


def loads(cluster: LocalCluster) -> dict[str, Any]:
    return {each.name: each.load for each in client(cluster).cluster().instances if each.status == "up"}


def flush(cluster: LocalCluster) -> None:
    client(cluster).post("/admin/cache/flush", {}, 30)


def require_alike(found: tuple[str, list[float]], other: tuple[str, list[float]]) -> None:
    """Require equal tokens, and logprobs of the prompt that are equal but for the way of computing."""
    assert found[0] == other[0]
    assert max(abs(a - b) for a, b in zip(found[1], other[1], strict=True)) < 1e-4


QUESTION = (part_of(1, 150, 90), "What is on it, and on", part_of(2, 64, 200), "this one?")


def test_e_encodes_and_tokens_and_logits_of_the_prompt_are_those_of_p_alone(cluster: LocalCluster) -> None:
    wait_until(lambda: "registered with E0" in cluster.logs("P0"), 30, "P0 has registered with E0")
    with_e = ask(cluster, *QUESTION)
    wait_until(lambda: loads(cluster)["E0"].images == 2, 10, lambda: str(loads(cluster)))
    assert loads(cluster)["P0"].images == 0 and loads(cluster)["E0"].bytes_moved > 0
    again = ask(cluster, QUESTION[0], "And now?", part_of(3, 100, 100))
    assert again[0] != with_e[0]
    wait_until(lambda: loads(cluster)["E0"].images == 3, 10, "only the new one was encoded")

    client(cluster).drain("E0", force=False)
    wait_until(lambda: "E0" not in loads(cluster), 30, "E0 has left")
    flush(cluster)
    cluster.restart("P0")
    wait_until(lambda: cluster.poll() or "P0" in loads(cluster), 90, "P0 is back")
    alone = ask(cluster, *QUESTION)
    wait_until(lambda: loads(cluster)["P0"].images == 2, 10, "P0 has encoded")
    require_alike(alone, with_e)
    assert len(alone[1]) > 50


def test_e_that_is_killed_is_missed_by_nobody_and_joins_again(cluster: LocalCluster) -> None:
    if "E0" not in loads(cluster):
        cluster.restart("E0")
        wait_until(lambda: cluster.poll() or "E0" in loads(cluster), 90, lambda: cluster.logs("E0"))
    cluster.kill("E0")
    found = ask(cluster, part_of(5, 90, 90), "What is it?")
    require_alike(ask(cluster, part_of(5, 90, 90), "What is it?"), found)
    cluster.restart("E0")
    wait_until(lambda: cluster.poll() or "E0" in loads(cluster), 90, lambda: cluster.logs("E0"))


def test_no_instance_becomes_an_e_and_e_becomes_none(cluster: LocalCluster) -> None:
    with pytest.raises(RoleRefused, match="E0 cannot become a prefill instance: an E has the vision tower alone"):
        client(cluster).change_role("E0", Role.PREFILL, force=True)
    with pytest.raises(RequestError, match="'encode' is not supported"):
        client(cluster).change_role("P0", Role.ENCODE, force=True)
