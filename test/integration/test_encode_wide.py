"""E with every kind of instance that computes prompts, and more than one of each: what the rows of a prompt give, and
the tokens, are those of `transformers`."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from nursery import WITH_TRANSFORMERS
from safetensors.torch import load_file, save_file
from support.router_process import wait_until
from test_image_cluster import (
    PD,
    TURNS,
    Reference,
    ask_all,
    asked,
    image_part,
    make_experts,
    picture,
    require_right,
    user,
)
from test_role_change import ANY_PORTS, client

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)

ROUTER = "dp_config.router"
KINDS = ["tp", "unified", pytest.param("mooncake", marks=pytest.mark.by_hand)]


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
    with LocalCluster(load_topology(name, settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(120)
        yield cluster


def loads(cluster: LocalCluster) -> dict[str, Any]:
    return {each.name: each.load for each in client(cluster).cluster().instances if each.status == "up"}


def num_encoded(cluster: LocalCluster, *names: str) -> int:
    """Return how many images the instances have encoded whose names begin so."""
    return sum(load.images for name, load in loads(cluster).items() if name.startswith(names))


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
    wait_until(lambda: num_encoded(cluster, "E", "P", "U") == 4, 10, lambda: str(loads(cluster)))
    assert num_encoded(cluster, "E") >= 2, "the router has an instance encode itself what E would have later"


def test_weights_change_with_those_of_e_and_no_feature_of_old_ones_is_used(
    cluster: LocalCluster, served: Path, tmp_path: Path
) -> None:
    """Every number of the new folder is another one: a tower that stays old shows in all rows behind an image."""
    folder = tmp_path / "other"
    shutil.copytree(served, folder)
    tensors, noise = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += 0.1 * tensor.std(correction=0) * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    before, of_all = num_encoded(cluster, "E"), num_encoded(cluster, "E", "P", "U")
    state = msgspec.json.decode(client(cluster).post("/admin/weights", {"path": str(folder)}, 60)[1])
    assert state["number"] == 1 and state["path"] == str(folder), state
    wait_until(lambda: f"serves the weights in {folder}" in cluster.logs("E0"), 20, lambda: cluster.logs("E0"))
    changed = Reference(folder)
    (answer,) = ask_all(cluster.url, [asked(TURNS[2], prompt_logprobs=2)])
    require_right(changed, TURNS[2], answer)
    wait_until(lambda: num_encoded(cluster, "E", "P", "U") == of_all + 3, 10, lambda: str(loads(cluster)))
    assert num_encoded(cluster, "E") > before
    with pytest.raises(AssertionError):
        require_right(Reference(served), TURNS[2], answer)


# ------------------------------------------------------------------------------------------- 2E2P3D behind two routers


@pytest.fixture(scope="module")
def many(model: Path) -> Iterator[LocalCluster]:
    here = "{host: 127.0.0.1, port: 0}"
    numbers = {"prefill": 2, "decode": 3, "encode": 2}
    lists = [f"{ROUTER}.{role}_schedulers=[{', '.join([here] * count)}]" for role, count in numbers.items()]
    settings = [each for each in settings_of(model) if "encode_schedulers" not in each]
    settings += [*ANY_PORTS, *lists, f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]", f"{ROUTER}.host=127.0.0.1"]
    with LocalCluster(load_topology("pd_disagg_2p2d_multi_node", settings), entries=WITH_TRANSFORMERS) as cluster:
        cluster.wait_ready(120)
        wait_registered(cluster)
        yield cluster


@pytest.fixture(scope="module")
def right(model: Path) -> Reference:
    return Reference(model)


@pytest.mark.by_hand
def test_two_routers_with_two_e_and_two_p_and_three_d_give_what_one_of_each_gives(
    many: LocalCluster, right: Reference
) -> None:
    for url in many.router_urls.values():
        answers = ask_all(url, [asked(messages, prompt_logprobs=2) for messages in TURNS])
        for messages, answer in zip(TURNS, answers, strict=True):
            require_right(right, messages, answer)
    wait_until(lambda: num_encoded(many, "E", "P") >= 4, 10, lambda: str(loads(many)))
    assert num_encoded(many, "E0") and num_encoded(many, "E1")


@pytest.mark.by_hand
def test_an_e_that_is_killed_with_images_in_its_hands_leaves_them_to_the_other_one(
    many: LocalCluster, right: Reference
) -> None:
    files = [picture(number, (60 + number, 140 - number)) for number in range(20, 26)]
    messages = [user("All of", *[image_part(file) for file in files], "at once?")]
    before, of_all = num_encoded(many, "E1"), num_encoded(many, "E1", "P")
    many.kill("E0", signal.SIGSTOP)  # so the images that it is asked for are in its hands until it dies
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.extend(ask_all(many.url, [asked(messages, prompt_logprobs=2)])))
    asking.start()
    wait_until(lambda: num_encoded(many, "E1") > before, 20, "the other one has encoded its own")
    assert not answers and num_encoded(many, "E1", "P") < of_all + len(files), "none was in the hands of E0"
    many.kill("E0")
    asking.join(60.0)
    require_right(right, messages, answers[0])
    wait_until(lambda: num_encoded(many, "E1", "P") == of_all + len(files), 10, "the others have encoded all")
    many.restart("E0")
    wait_until(lambda: "E0" in loads(many), 60, lambda: many.logs("E0"))
