"""Operators' orders at two routers at once: what one of them is told, both do, and no request is refused meanwhile.

Then random requests while operators change roles and weights at both, pause the cluster at one and resume it at the
other, and a router is killed: every answer is that of one engine with one of the weights, and none is a 503.

CI sends the first 80. By hand, 2,000: `.venv/bin/python -m pytest test/integration/test_router_storm.py --by-hand`
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from completions import instance_loads, is_whole
from nursery import FORKED
from random_requests import Answer, Drawn, ask, differences, request_of
from support.router_process import wait_until
from thinking_model import CLOSE, make_thinking_model

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.net.curve import derive
from chitu.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
VOCAB = 500
AT_ONCE = 6
IN_CI, BY_HAND = 80, 2000
KILL_AFTER_S = 4.0
ROUTER = "dp_config.router"
NAMES = ("router", "router.1")
REFUSALS = {"last_instance", "role_refused", "unknown_instance", "weights_refused"}
"""What an operator may be told in a storm."""
ORDERS = ("role", "weights", "pause", "resume")
COMMON = ["model.served_name=m", "model.max_model_len=1024", "scheduler.threads=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": VOCAB}
    base = tmp_path_factory.mktemp("models")
    return [make_thinking_model(base / f"w{seed}", seed=seed, **sizes) for seed in range(2)]


@pytest.fixture(scope="module", params=[IN_CI, pytest.param(BY_HAND, marks=pytest.mark.by_hand)])
def drawn(request: pytest.FixtureRequest, folders: list[Path]) -> list[Drawn]:
    end_of_thought = Tokenizer.load(folders[0]).added_token_ids[CLOSE]
    return [request_of(number, VOCAB, end_of_thought) for number in range(request.param)]


@pytest.fixture(scope="module")
def right(folders: list[Path], drawn: list[Drawn]) -> list[list[Answer]]:
    """Return the answers of one engine that caches nothing, with each of the weights."""
    answers = []
    for folder in folders:
        settings = [f"model.path={folder}", *COMMON, "cache.num_pages=400", "cache.prefix_cache=false"]
        with LocalCluster(load_topology("unified_local", settings), entries=FORKED) as cluster:
            cluster.wait_ready(300)
            answers.append(ask(cluster.url, drawn, at_once=16, streamed=0.0))
    return answers


@contextlib.contextmanager
def two_routers(folder: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={folder}", *COMMON, "cache.num_pages=800", f"{ROUTER}.hosts=[127.0.0.1, 127.0.0.1]"]
    settings += [f"{ROUTER}.{role}_schedulers=[{{port: 0}}, {{port: 0}}]" for role in ("prefill", "decode")]
    settings += [f"{ROUTER}.pd_disaggregation.deadlines.role_change_s=1"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.fixture(scope="module")
def cluster(folders: list[Path]) -> Iterator[LocalCluster]:
    with two_routers(folders[0]) as cluster:
        yield cluster


def operator(cluster: LocalCluster, name: str, route: str, **body: object) -> httpx.Response:
    """Ask a router as an operator does."""
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    return httpx.post(f"{cluster.router_urls[name]}{route}", json=body, headers=headers, trust_env=False, timeout=60.0)


def complete(cluster: LocalCluster, name: str, max_tokens: int = 3) -> int:
    """Return the status of a completion."""
    body = {"prompt": [20, 21, 22], "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(
        f"{cluster.router_urls[name]}/v1/completions", json=body, trust_env=False, timeout=60.0
    ).status_code


def up(cluster: LocalCluster, name: str) -> list[str]:
    shown = httpx.get(f"{cluster.router_urls[name]}/cluster", trust_env=False, timeout=60.0).json()
    return [each["name"] for each in shown["instances"] if each["status"] == "up"]


def test_of_two_changes_of_role_at_once_at_two_routers_one_leaves_the_last_p(cluster: LocalCluster) -> None:
    def ask_for(name: str, instance: str, role: str) -> httpx.Response:
        return operator(cluster, name, "/admin/role", instance=instance, role=role)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(ask_for, NAMES, ("P0", "P1"), ["decode"] * 2))
        assert sorted(reply.status_code for reply in told) == [200, 409], [reply.text for reply in told]
        for _ in range(20):
            assert {complete(cluster, name) for name in NAMES} == {200}
        for name in NAMES:
            wait_until(lambda name=name: len(up(cluster, name)) == 4, 20, lambda: [up(cluster, each) for each in NAMES])
        assert len({*up(cluster, NAMES[0])} & {"P0", "P1"}) == 1
        told = list(pool.map(ask_for, NAMES, ("D0", "D1"), ["prefill"] * 2))
        names = {reply.json()["becomes"] for reply in told}
        assert len(names) == 2, [reply.text for reply in told]
        for name in NAMES:
            wait_until(
                lambda name=name: names <= {*up(cluster, name)}, 20, lambda: [up(cluster, each) for each in NAMES]
            )
    assert all(cluster.alive(name) for name in ("P0", "P1", "D0", "D1")), "a process ended"
    assert {complete(cluster, name) for name in NAMES} == {200}


@dataclass
class Operator:
    """One who asks one router for random things until `stop` is set, and resumes at the other."""

    cluster: LocalCluster
    name: str
    folders: list[Path]
    seed: int
    stop: threading.Event
    told: Counter[str] = field(default_factory=Counter)

    def post(self, name: str, route: str, **body: object) -> None:
        try:
            reply = operator(self.cluster, name, route, **body)
        except httpx.TransportError:  # this router is being killed, or was
            self.told["connection"] += 1
            self.stop.wait(0.2)
        else:
            error = {} if reply.status_code == 200 else reply.json()["error"]
            is_cut = "which decides on this, does not answer" in error.get("message", "")  # it is being killed
            self.told["connection" if is_cut else error.get("code", route)] += 1

    def run(self) -> None:
        rng, other = random.Random(self.seed), NAMES[self.name == NAMES[0]]
        while not self.stop.wait(rng.uniform(0.0, 0.5)):
            drawn = rng.random()
            if drawn < 0.6:
                with contextlib.suppress(httpx.TransportError):
                    shown = httpx.get(
                        f"{self.cluster.router_urls[self.name]}/cluster", trust_env=False, timeout=60.0
                    ).json()
                    one = rng.choice([each for each in shown["instances"] if each["status"] != "down"] or [None])
                    if one is not None:
                        role = "decode" if one["role"] == "prefill" else "prefill"
                        self.post(self.name, "/admin/role", instance=one["name"], role=role)
            elif drawn < 0.8:
                self.post(self.name, "/admin/weights", path=str(rng.choice(self.folders)))
            else:
                self.post(self.name, "/admin/pause", mode=rng.choice(["keep", "finish"]))
                self.stop.wait(rng.uniform(0.0, 0.3))
                self.post(other, "/admin/resume")
                if self.told["connection"]:  # the other one may be gone
                    self.post(self.name, "/admin/resume")


@contextlib.contextmanager
def storm(cluster: LocalCluster, folders: list[Path]) -> Iterator[Counter[str]]:
    """Let an operator at each router do what they like, and kill one router after the other, until the block ends."""
    stop, told = threading.Event(), Counter[str]()
    operators = [Operator(cluster, name, folders, seed, stop) for seed, name in enumerate(NAMES)]

    def kill() -> None:
        for name in NAMES:
            if stop.wait(KILL_AFTER_S):
                return
            cluster.kill(name)
            cluster.wait_exit(name)
            told["killed"] += 1
            stop.wait(KILL_AFTER_S)
            cluster.restart(name)
            wait_until(cluster.ready, 60, f"{name} is back")

    threads = [threading.Thread(target=each.run) for each in operators] + [threading.Thread(target=kill)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for each in operators:
            told.update(each.told)
            each.post(each.name, "/admin/resume")


def test_a_storm_of_orders_at_two_routers_changes_no_answer_and_refuses_none(
    folders: list[Path], drawn: list[Drawn], right: list[list[Answer]]
) -> None:
    with two_routers(folders[0]) as cluster:
        first, second = (cluster.router_urls[name] for name in NAMES)
        with storm(cluster, folders) as told:
            found = ask(first, drawn, AT_ONCE, streamed=0.4, others=[second])
        print(dict(told))
        wrong = [
            f"{one.number}: {[[choice.tokens for choice in each.choices.values()] for each in (answer, *known)]}"
            for one, answer, *known in zip(drawn, found, *right, strict=True)
            if all(differences(one, each, answer) for each in known)
        ]
        assert not wrong, "\n".join(
            [f"{len(wrong)} of {len(drawn)}; by number: tokens, then those of each of the weights", *wrong, str(told)]
        )
        for url in (first, second):
            wait_for_rest(url)
    assert told["killed"] and told["/admin/role"] and told["/admin/weights"] and told["/admin/pause"], dict(told)
    assert told.keys() <= {"killed", "connection", *REFUSALS, *(f"/admin/{x}" for x in ORDERS)}, dict(told)


def wait_for_rest(url: str) -> None:
    """Wait until nothing runs, and no page is held."""
    wait_until(lambda: all(map(is_whole, instance_loads(url).values())), 30.0, lambda: instance_loads(url))
