"""`chitu role` on a real 2P2D cluster with the engine on CPUs: D1 becomes P2 and D1 again under load.

What it computed as D serves it as P: it finds in its prefix cache the prompts that P had written to its pages.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from nursery import FORKED
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.errors import LastInstance, RoleRefused, UnknownInstance
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive, make_context
from chitu.net.sockets import connect
from chitu.protocol import PROTOCOL_VERSION, InstanceInfo, Join, encode
from chitu.types import Role

pytestmark = pytest.mark.timeout(180)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
ANY_PORTS = [
    *(f"dp_config.router.{name}_port=0" for name in ("stats", "token")),
    *(f"dp_config.router.pd_disaggregation.{name}_port=0" for name in ("coordination", "metadata_sync", "bootstrap")),
]
SETTINGS = [
    f"model.path={TINY_MODEL_DIR}",
    "cache.num_pages=400",
    "scheduler.max_running_requests=8",
    "dp_config.router.pd_disaggregation.deadlines.role_change_s=1",
    *(
        f"dp_config.router.{section}=[{{port: 0}}, {{port: 0}}]"
        for section in ("prefill_schedulers", "decode_schedulers")
    ),
    *ANY_PORTS,
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(load_topology("pd_disagg_1p1d_local", SETTINGS), entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def client(cluster: LocalCluster) -> RouterClient:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    return RouterClient(cluster.url, secrets.token)


def answer(cluster: LocalCluster, number: int, max_tokens: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.ports["port"], timeout=90)
    body = {"prompt": f"{number}. {PROMPT}", "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    found = json.loads(reply.read())
    assert reply.status == 200, found
    return {"text": found["choices"][0]["text"], "cached": found["usage"]["prompt_tokens_details"]["cached_tokens"]}


def role(cluster: LocalCluster, name: str, wanted: str) -> float:
    """Call `chitu role` and return the seconds that it says."""
    argv = [sys.executable, "-m", "chitu.cli", "role", name, wanted, "--url", cluster.url]
    done = subprocess.run(
        argv,
        env={**os.environ, "CHITU_CLUSTER_KEY": cluster_key_of(cluster.topology)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rsplit(" s after", 1)[0].rsplit(" ", 1)[1])


@pytest.fixture
def whole(cluster: LocalCluster) -> LocalCluster:
    """Return the cluster, with what an earlier test has drained."""
    for name in ("P0", "P1", "D0", "D1"):
        if not cluster.alive(name):
            cluster.restart(name)
    wait_until(lambda: cluster.poll() or len(names(cluster)) == 4, 60, lambda: f"all serve: {names(cluster)}")
    return cluster


def names(cluster: LocalCluster) -> dict[str, str]:
    return {i.name: i.home for i in client(cluster).cluster().instances if i.status == "up"}


def test_d1_becomes_p2_and_d1_again_under_load_and_its_cached_prefixes_stay(cluster: LocalCluster) -> None:
    right = {number: answer(cluster, number, 60)["text"] for number in range(4)}
    stop = threading.Event()

    def load(number: int) -> list[str]:
        texts = []
        while not stop.is_set():
            texts.append(answer(cluster, number, 60)["text"])
        return texts

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(load, number) for number in range(4)]
        try:
            seconds = [role(cluster, "D1", "prefill")]
            assert names(cluster) == {"P0": "", "P1": "", "P2": "D1", "D0": ""}
            client(cluster).drain("P0", force=False)
            wait_until(lambda: "P0" not in names(cluster), 30, "P0 has left")
            client(cluster).drain("P1", force=False)  # so P2 serves all, and nothing but what it had as D is cached
            wait_until(lambda: "P1" not in names(cluster), 30, "P1 has left")
            cached = [answer(cluster, number, 2)["cached"] for number in range(4)]
            cluster.wait_exit("P0")
            cluster.restart("P0")
            wait_until(lambda: cluster.poll() or "P0" in names(cluster), 60, "P0 is back")
            seconds.append(role(cluster, "P2", "decode"))
        finally:
            stop.set()
        for number, future in enumerate(running):
            texts = future.result()
            assert texts and set(texts) == {right[number]}, number
    assert names(cluster) == {"P0": "", "D0": "", "D1": ""}
    assert max(cached) > 100, cached
    print(f"seconds {seconds}, cached tokens {cached}")

    def progress() -> dict[str, object]:
        told: dict[str, object] = json.loads((cluster.log_dir / "D1.progress").read_text())
        return told

    # Its next heartbeat tells so.
    wait_until(lambda: "is_member" in progress() and "place" not in progress(), 30, lambda: str(progress()))


def test_what_is_refused_names_the_reason(cluster: LocalCluster) -> None:
    router = client(cluster)
    with pytest.raises(LastInstance, match="chitu role P0 decode --force"):
        router.change_role("P0", Role.DECODE, force=False)
    with pytest.raises(UnknownInstance):
        router.change_role("D7", Role.PREFILL, force=False)
    with pytest.raises(RoleRefused, match="D1 is a decode instance already"):
        router.change_role("d1", Role.DECODE, force=False)


@pytest.mark.by_hand
def test_one_whose_name_was_taken_meanwhile_gets_another_one(whole: LocalCluster) -> None:
    """Another router may have given the same name. Here a member that nobody runs has it."""
    known = next(i for i in client(whole).cluster().instances if i.name == "P0")
    assert known.layout is not None
    taker = InstanceInfo(Role.PREFILL, 2, 999, "127.0.0.1", 1, 1, known.layout, 512, draining=True, former=(998,))
    pid = whole.pid("D1")
    assert client(whole).change_role("D1", Role.PREFILL, force=False).becomes == "P2"
    context = make_context(derive(cluster_key_of(whole.topology)))
    socket = connect(context, zmq.DEALER, "127.0.0.1", whole.ports["coordination_port"])
    socket.send(encode(Join(PROTOCOL_VERSION, taker)))
    wait_until(lambda: names(whole).get("P3") == "D1", 30, lambda: f"D1 is P3: {names(whole)}")
    assert whole.pid("D1") == pid and whole.alive("D1"), "its process ended"
    wait_until(lambda: "P2" not in {i.name for i in client(whole).cluster().instances}, 30, "the lease of P2 ends")
    role(whole, "P3", "decode")
    assert names(whole) == {"P0": "", "P1": "", "D0": "", "D1": ""}
    socket.close(0)
    context.term()
