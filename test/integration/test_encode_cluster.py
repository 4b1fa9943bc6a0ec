"""2E1P1D with the engine on CPUs: what E encode, P computes with as with what it encodes itself."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from nursery import WITH_TRANSFORMERS
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
        "dp_config.router.encode_schedulers=[{port: 0}, {port: 0}]",
        *ANY_PORTS,
    ]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=WITH_TRANSFORMERS) as cluster:
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


def encoded(cluster: LocalCluster) -> int:
    """Return how many images the E have encoded that are there."""
    return sum(load.images for name, load in loads(cluster).items() if name[0] == "E")


def wait_for(cluster: LocalCluster, *names: str) -> None:
    wait_until(lambda: cluster.poll() or set(names) <= loads(cluster).keys(), 90, lambda: f"{names} are not back")


def restart(cluster: LocalCluster, *names: str) -> None:
    """Start these again, and if P is one of them, wait until it knows all E that are there."""
    here = {name for name in ("E0", "E1") if name in loads(cluster) or name in names}
    known = {name: cluster.logs("P0").count(f"registered with {name}") for name in here}
    for name in names:
        cluster.restart(name)
    wait_for(cluster, *names)
    for name, count in known.items() if "P0" in names else ():
        wait_until(
            lambda name=name, count=count: cluster.logs("P0").count(f"registered with {name}") > count, 30, "registered"
        )


def flush(cluster: LocalCluster) -> None:
    client(cluster).post("/admin/cache/flush", {}, 30)


def require_alike(found: tuple[str, list[float]], other: tuple[str, list[float]]) -> None:
    """Require equal tokens, and logprobs of the prompt that are equal but for the way of computing."""
    assert found[0] == other[0]
    assert max(abs(a - b) for a, b in zip(found[1], other[1], strict=True)) < 1e-4


QUESTION = (part_of(1, 150, 90), "What is on it, and on", part_of(2, 64, 200), "this one?")


def test_e_encode_and_tokens_and_logits_of_the_prompt_are_those_of_p_alone(cluster: LocalCluster) -> None:
    for name in ("E0", "E1"):
        wait_until(lambda name=name: f"registered with {name}" in cluster.logs("P0"), 30, "P0 has registered")
    with_e = ask(cluster, *QUESTION)
    wait_until(lambda: encoded(cluster) == 2, 10, lambda: str(loads(cluster)))
    found = loads(cluster)
    assert found["P0"].images == 0 and found["E0"].images == found["E1"].images == 1, "the two images went to two E"
    assert found["E0"].bytes_moved > 0 and found["E0"].image_load.row_s > 0 and len(found["E0"].image_load.keys) == 8
    again = ask(cluster, QUESTION[0], "And now?", part_of(3, 100, 100))
    assert again[0] != with_e[0]
    wait_until(lambda: encoded(cluster) == 3, 10, "only the new one was encoded")

    for name in ("E0", "E1"):
        client(cluster).drain(name, force=False)
        wait_until(lambda name=name: name not in loads(cluster), 30, f"{name} has left")
    flush(cluster)
    restart(cluster, "P0")
    alone = ask(cluster, *QUESTION)
    wait_until(lambda: loads(cluster)["P0"].images == 2, 10, "P0 has encoded")
    require_alike(alone, with_e)
    assert len(alone[1]) > 50 and loads(cluster)["P0"].image_load.row_s > 0


def test_e_that_is_killed_is_missed_by_nobody_and_the_other_one_is_asked_for_what_it_has_since(
    cluster: LocalCluster,
) -> None:
    """The image goes first to the E that its key prefers. The other one gets it when that is dead, and is asked again
    when both are there, by a P that has nothing: for the router knows who has what."""
    restart(cluster, *sorted({"E0", "E1"} - loads(cluster).keys()))
    question = (part_of(5, 90, 90), "What is it?")
    before = {name: load.images for name, load in loads(cluster).items()}
    found = ask(cluster, *question)
    wait_until(lambda: encoded(cluster) > before["E0"] + before["E1"], 10, lambda: str(loads(cluster)))
    first = next(name for name in ("E0", "E1") if loads(cluster)[name].images > before[name])
    other = "E1" if first == "E0" else "E0"
    cluster.kill(first)
    wait_until(lambda: first not in loads(cluster), 10, "it is missed")
    restart(cluster, "P0")
    require_alike(ask(cluster, *question), found)
    wait_until(lambda: loads(cluster)[other].images == before[other] + 1, 10, lambda: str(loads(cluster)))

    restart(cluster, first)
    restart(cluster, "P0")
    require_alike(ask(cluster, *question), found)
    wait_until(lambda: loads(cluster)[other].image_load.hits == 1, 10, lambda: str(loads(cluster)))
    found_loads = loads(cluster)
    assert found_loads[first].images == 0 and found_loads["P0"].images == 0
    text = client(cluster).get("/metrics").decode()
    assert f'chitu_instance_image_hits_total{{instance="{other}",role="encode"}} 1.0' in text


def test_no_instance_becomes_an_e_and_e_becomes_none(cluster: LocalCluster) -> None:
    with pytest.raises(RoleRefused, match="E0 cannot become a prefill instance: an E has the vision tower alone"):
        client(cluster).change_role("E0", Role.PREFILL, force=True)
    with pytest.raises(RequestError, match="'encode' is not supported"):
        client(cluster).change_role("P0", Role.ENCODE, force=True)
