"""A cluster of two routers, a P of two ranks and a D that sleeps: memory goes back to the system and comes back, and
answers after it have the tokens and logprobs of those before, bit by bit."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from forgetful_scheduler import A_TENSOR, THE_CACHE
from nursery import FORKED, forked
from safetensors.torch import load_file, save_file
from support.router_process import wait_until

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries
from chitu.net.curve import derive
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
VOCAB, PROMPT_TOKENS, OUTPUT_TOKENS = 500, 130, 8
SIZES: dict[str, Any] = {"layers": 4, "hidden_size": 256, "intermediate_size": 4096, "heads": 4, "kv_heads": 2}
ROUTER = "dp_config.router"
NAMES = ("router", "router.1")
SLACK_BYTES = 4 << 20
"""What a process may free meanwhile for other reasons."""
GROWTH_BYTES = 40 << 20
"""What it may take: less than the weights of a rank that reads them beside those that it had."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", vocab_size=VOCAB, **SIZES)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={folder}", "model.served_name=m", "cache.num_pages=800", "scheduler.threads=1"]
    settings += ["model.max_model_len=1400", f"{ROUTER}.host=127.0.0.1", f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]"]
    settings += [f"{ROUTER}.prefill_schedulers=[{{host: 127.0.0.1, tp_size: 2, devices: [cpu, cpu]}}]"]
    settings += [f"{ROUTER}.decode_schedulers=[{{host: 127.0.0.1}}]"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def operator(cluster: LocalCluster, route: str, router: int = 0, **body: object) -> httpx.Response:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    url = cluster.router_urls[NAMES[router]]
    headers = {"Authorization": f"Bearer {secrets.token}"}
    return httpx.post(f"{url}{route}", json=body, headers=headers, trust_env=False, timeout=120)


def sleep(cluster: LocalCluster, level: int, router: int = 0, **more: object) -> dict[str, Any]:
    reply = operator(cluster, "/admin/sleep", router, level=level, **more)
    assert reply.status_code == 200, reply.text
    state: dict[str, Any] = reply.json()
    assert {each["instance"]: each["level"] >= level for each in state["instances"]} == {"P0": True, "D0": True}
    return state


def wake(cluster: LocalCluster, router: int = 0) -> dict[str, Any]:
    reply = operator(cluster, "/admin/wake", router)
    assert reply.status_code == 200, reply.text
    state: dict[str, Any] = reply.json()
    return state


def ask(cluster: LocalCluster, prompts: list[list[int]], router: int = 0, **more: object) -> httpx.Response:
    body = {"prompt": prompts, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 3, **more}
    url = cluster.router_urls[NAMES[router]]
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=120)


def complete(cluster: LocalCluster, prompts: list[list[int]], router: int = 0, **more: object) -> list[dict[str, Any]]:
    """Return tokens and logprobs of each answer."""
    reply = ask(cluster, prompts, router, **more)
    assert reply.status_code == 200, reply.text
    return [{"ids": choice["token_ids"], "logprobs": choice["logprobs"]} for choice in reply.json()["choices"]]


def prompts_of(seed: int, count: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, VOCAB - 20, (count, PROMPT_TOKENS)).tolist()


def rss_bytes(pid: int) -> int:
    """Return what a process has in memory but files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return kib["Rss"] << 10


def pools_of(pid: int) -> dict[int, int]:
    """Return what each pool that a process maps, of its own or of a peer, takes of the machine's memory, by inode."""
    files: dict[int, int] = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{name}"
        if os.readlink(link).startswith("/memfd:chitu-kv"):
            found = os.stat(link)
            files[found.st_ino] = found.st_blocks * 512
    return files


def memory(cluster: LocalCluster) -> dict[str, tuple[int, int]]:
    """Return both of P's main rank and of D, whose pool P maps, too."""
    pids = {name: cluster.pid(name) for name in ("P0", "D0")}
    pools = {name: pools_of(pid) for name, pid in pids.items()}
    own = {"D0": pools["D0"], "P0": {inode: used for inode, used in pools["P0"].items() if inode not in pools["D0"]}}
    return {name: (rss_bytes(pid), sum(own[name].values())) for name, pid in pids.items()}


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_back_and_answers_after_waking_have_the_bits_of_those_before(
    cluster: LocalCluster, folder: Path, level: int
) -> None:
    prompts = prompts_of(level, 8)
    expected = complete(cluster, prompts)
    before = memory(cluster)
    state = sleep(cluster, level)
    asleep = memory(cluster)
    print({name: (before[name], asleep[name]) for name in before}, weight_bytes(folder), state)
    freed = {each["instance"]: each["freed_bytes"] for each in state["instances"]}
    for name, ranks in (("P0", 2), ("D0", 1)):
        (rss, pool), (rss_asleep, pool_asleep) = before[name], asleep[name]
        assert pool > 1 << 20 and pool_asleep == 0
        own = weight_bytes(folder) / ranks if level == 2 else 0
        assert rss - rss_asleep >= pool + own - SLACK_BYTES, (name, rss, rss_asleep, pool, own)
        assert freed[name] >= ranks * pool + ranks * own - SLACK_BYTES
    assert wake(cluster)["missing"] == []
    assert complete(cluster, prompts) == expected
    awake = memory(cluster)
    print(awake)
    for name in before:
        own = weight_bytes(folder) / (2 if name == "P0" else 1) if level == 2 else 0
        assert awake[name][1] > 1 << 20 and awake[name][0] > asleep[name][0] + awake[name][1] + own - SLACK_BYTES
        assert awake[name][0] < before[name][0] + GROWTH_BYTES


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_at_any_router_wakes_the_cluster_and_is_answered(cluster: LocalCluster, level: int) -> None:
    prompts = prompts_of(10 + level, 2)
    expected = complete(cluster, prompts)
    for router, asks in ((0, 1), (1, 1), (1, 0)):
        sleep(cluster, level, router)
        assert complete(cluster, prompts, asks) == expected
    assert wake(cluster, 1)["level"] == 0


def test_a_cluster_that_is_to_stay_asleep_refuses_requests_by_name(cluster: LocalCluster) -> None:
    prompts = prompts_of(20, 1)
    expected = complete(cluster, prompts)
    assert sleep(cluster, 2, wake_on_request=False)["wake_on_request"] is False
    for router in (0, 1):
        refused = ask(cluster, prompts, router)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert wake(cluster, 1) == {
        "level": 0,
        "wake_on_request": True,
        "instances": [{"instance": name, "level": 0, "freed_bytes": 0, "keeps": ""} for name in ("D0", "P0")],
        "missing": [],
    }
    assert complete(cluster, prompts) == expected


def test_sleeping_and_waking_twice_is_as_once(cluster: LocalCluster, folder: Path) -> None:
    prompts = prompts_of(30, 1)
    expected = complete(cluster, prompts)
    for level in (1, 2, 2, 1):
        state = sleep(cluster, level)
    assert {each["level"] for each in state["instances"]} == {2}
    for route, body in (("/admin/pause", {}), ("/admin/weights", {"path": str(folder)})):
        refused = operator(cluster, route, **body)
        assert refused.status_code == 409 and "sleeps" in refused.json()["error"]["message"], refused.text
    for _ in range(2):
        assert wake(cluster)["level"] == 0
    assert complete(cluster, prompts) == expected


def statuses(cluster: LocalCluster, router: int = 0) -> dict[str, str]:
    url = cluster.router_urls[NAMES[router]]
    reply = httpx.get(f"{url}/cluster", trust_env=False, timeout=10).json()
    return {each["name"]: each["status"] for each in reply["instances"]}


ASLEEP = {"P0": "asleep", "D0": "asleep"}


@pytest.mark.parametrize("dead", [("D0",), ("router",), ("router", "router.1"), ("router", "P0")])
def test_whoever_dies_while_the_cluster_sleeps_comes_back_into_it(cluster: LocalCluster, dead: tuple[str, ...]) -> None:
    prompts = prompts_of(40, 1)
    expected = complete(cluster, prompts)
    sleep(cluster, 2)
    for name in dead:
        cluster.kill(name)
    for name in dead:
        cluster.wait_exit(name)
        cluster.restart(name)
    cluster.wait_ready()
    wait_until(lambda: statuses(cluster, 0) == statuses(cluster, 1) == ASLEEP, 60, lambda: str(statuses(cluster)))
    assert not any(pools_of(cluster.pid(name)) and sum(pools_of(cluster.pid(name)).values()) for name in ASLEEP)
    assert complete(cluster, prompts, 1) == expected
    wait_until(lambda: set(statuses(cluster).values()) == {"up"}, 30, "all awake")


def test_sleep_waits_for_a_stream_and_says_what_runs(cluster: LocalCluster) -> None:
    (prompt,) = prompts_of(50, 1)
    answers: list[list[dict[str, Any]]] = []
    streaming = threading.Thread(target=lambda: answers.append(complete(cluster, [prompt], 1, max_tokens=500)))
    streaming.start()
    wait_until(lambda: running(cluster), 30, "the stream")
    late = operator(cluster, "/admin/sleep", timeout_s=0.2)
    assert late.status_code == 504 and "requests run on D0" in late.json()["error"]["message"], late.text
    assert streaming.is_alive()
    sleep(cluster, 1)
    streaming.join()
    assert len(answers[0][0]["ids"]) == 500
    assert wake(cluster)["missing"] == []


def running(cluster: LocalCluster) -> bool:
    reply = httpx.get(f"{cluster.router_urls[NAMES[0]]}/cluster", trust_env=False, timeout=10).json()
    return any((each["load"] or {}).get("running") for each in reply["instances"] if each["name"] == "D0")


def test_a_request_that_comes_before_the_cluster_sleeps_keeps_it_awake(cluster: LocalCluster) -> None:
    for seed in range(51, 57):  # until the short one is answered while the stream runs
        long_one, short_one = prompts_of(seed, 2)
        streaming = threading.Thread(target=complete, args=(cluster, [long_one]), kwargs={"max_tokens": 900})
        streaming.start()
        wait_until(lambda: running(cluster), 30, "the stream")
        replies: list[httpx.Response] = []
        sleeping = threading.Thread(target=lambda to=replies: to.append(operator(cluster, "/admin/sleep")))
        sleeping.start()
        wait_until(lambda: operator(cluster, "/admin/sleep", 1, timeout_s=0.1).status_code == 504, 30, "both's word")
        complete(cluster, [short_one])
        is_before_its_end = streaming.is_alive()
        sleeping.join()
        streaming.join()
        if is_before_its_end:
            break
        wake(cluster)
    assert is_before_its_end
    assert replies[0].status_code == 409 and "woke the cluster" in replies[0].json()["error"]["message"]
    assert set(statuses(cluster).values()) == {"up"}


@pytest.mark.by_hand
def test_a_folder_that_was_written_during_the_sleep_serves_nothing_until_it_is_as_before(
    cluster: LocalCluster, folder: Path
) -> None:
    prompts = prompts_of(60, 1)
    expected = complete(cluster, prompts)
    sleep(cluster, 2)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][7, 3] += 0.5
    save_file(tensors, file, {"format": "pt"})
    missing = wake(cluster)["missing"]
    assert len(missing) == 2 and all("has other numbers than before the sleep" in each for each in missing), missing
    refused = ask(cluster, prompts, 1)
    assert refused.status_code == 503 and "instance is ready" in refused.json()["error"]["message"], refused.text
    file.write_bytes(whole)
    wait_until(lambda: set(statuses(cluster).values()) == {"up"}, 60, lambda: str(statuses(cluster)))
    assert complete(cluster, prompts) == expected


@pytest.mark.parametrize(
    ("transport", "library"),
    [("mooncake", "mooncake.engine"), pytest.param("nixl", "nixl_cu13", marks=pytest.mark.by_hand)],
)
def test_pools_that_libraries_write_to_over_tcp_go_and_are_written_again(
    folder: Path, tmp_path: Path, transport: str, library: str
) -> None:
    """Host memory and disk keep their pages: answers from there are those of before, too."""
    pytest.importorskip(library)
    settings = [f"model.path={folder}", "model.served_name=m", "cache.num_pages=800", "scheduler.threads=1"]
    settings += ["model.max_model_len=1400", f"{ROUTER}.pd_disaggregation.transport={transport}"]
    settings += ["cache.host_bytes=40000000", f"cache.disk.path={tmp_path}"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        prompts = prompts_of(80, 4)
        complete(cluster, prompts)
        expected = complete(cluster, prompts)
        for level in (1, 2):
            state = operator(cluster, "/admin/sleep", level=level).json()
            assert not any(each["keeps"] for each in state["instances"]), state
            assert not any(sum(pools_of(cluster.pid(name)).values()) for name in ("P0", "D0"))
            assert complete(cluster, prompts) == expected
        wait_until(lambda: tier_hits(cluster) >= 2 * 4 * 128, 10, lambda: str(tier_hits(cluster)))


def tier_hits(cluster: LocalCluster) -> int:
    """Return how many prompt tokens P found in host memory."""
    reply = httpx.get(f"{cluster.url}/cluster", trust_env=False, timeout=10).json()
    (load,) = [each["load"] for each in reply["instances"] if each["name"] == "P0"]
    return int(load["host_tokens"])


@pytest.fixture(scope="module")
def forgetful(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, Path]]:
    own = tmp_path_factory.mktemp("forgetful") / "model"
    shutil.copytree(folder, own)
    settings = [f"model.path={own}", "model.served_name=m", "cache.num_pages=400", "scheduler.threads=1"]
    topology = load_topology("unified_local", [*settings, "model.max_model_len=1400"])
    with LocalCluster(topology, entries=forked(Entries(scheduler="forgetful_scheduler"))) as cluster:
        cluster.wait_ready()
        yield cluster, own / "forgets"


@pytest.mark.parametrize("what", ["nothing", THE_CACHE, A_TENSOR])
def test_a_wake_that_forgets_something_is_seen_in_the_logprobs(forgetful: tuple[LocalCluster, Path], what: str) -> None:
    """A unified instance, which sleeps like others."""
    cluster, file = forgetful
    file.write_text("nothing")
    assert operator(cluster, "/admin/sleep", level=2).json()["instances"][0]["level"] == 2
    prompts = prompts_of(70, 2)
    expected = complete(cluster, prompts)
    file.write_text(what)
    freed = operator(cluster, "/admin/sleep", level=2).json()["instances"][0]["freed_bytes"]
    assert freed > 0.9 * weight_bytes(file.parent)
    assert (complete(cluster, prompts) == expected) is (what == "nothing")
    if what == A_TENSOR:  # which the folder has
        assert operator(cluster, "/admin/sleep", level=2).status_code == 200
        (missing,) = operator(cluster, "/admin/wake").json()["missing"]
        assert "attention.qkv[0] has other numbers than before the sleep" in missing
