"""Drains and graceful shutdowns under load: no client notices. Uses the same real 2P2D cluster as the chaos matrix.

An instance that is drained or terminated finishes what it runs; what outlasts `drain_s` continues elsewhere. A router
that is terminated finishes what runs and accepts nothing new; P and D join its successor by themselves.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from chaos_cluster import DEADLINES, PATIENCE_S, VOCAB_SIZE, ChaosCluster, short_ask
from support.router_process import wait_until
from support.steady_load import RIGHT, Ask, CheckedAnswer, count_outcomes

pytestmark = pytest.mark.timeout(150)
LONG_TOKENS = 300
"""Output tokens of a long request: 1.2 s and more of decoding."""
SHORT_DRAIN_S = 0.3


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """Yield a cluster with enough time to finish what runs, on a busy machine too."""
    with ChaosCluster(tmp_path_factory.mktemp("drain") / "c", f"{DEADLINES}.drain_s=20") as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ChaosCluster) -> Iterator[ChaosCluster]:
    """Yield a cluster that is whole before each test, and made whole after it even if the test failed."""
    yield shared
    come_back(shared)


def send_long(cluster: ChaosCluster, count: int = 6) -> list[Future[CheckedAnswer]]:
    rng = random.Random(count)
    prompts = [tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(200)) for _ in range(count)]
    return cluster.load.send(
        [Ask(p, LONG_TOKENS, stream=n % 2 == 0, request_id=f"long-{n}") for n, p in enumerate(prompts)]
    )


def decoding_on(cluster: ChaosCluster, name: str) -> list[str]:
    """Return the ids of the long requests that `name` takes part in and whose tokens are on their way to the client."""
    return [
        request.request_id
        for request in cluster.snapshot().requests
        if request.state == "decode" and request.ended_at_s is None and name in (request.prefill, request.decode)
    ]


def wait_decoding_on(cluster: ChaosCluster, name: str) -> list[str]:
    wait_until(lambda: any("long" in r for r in decoding_on(cluster, name)), 15, lambda: f"a long request on {name}")
    return decoding_on(cluster, name)


def finish(cluster: ChaosCluster, sent: list[Future[CheckedAnswer]]) -> None:
    """Check that every request was answered right."""
    for future in sent:
        future.result(PATIENCE_S + 10)
    cluster.load.pause(PATIENCE_S + 10)
    answers = cluster.load.take_answers()
    assert set(count_outcomes(answers)) == {RIGHT}, [f"{a.outcome}: {a.detail}" for a in answers if a.outcome != RIGHT]
    assert len(answers) >= len(sent)


def drain(cluster: ChaosCluster, name: str) -> None:
    argv = [sys.executable, "-m", "chitu.cli", "drain", name, "--url", cluster.processes.url]
    drained = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert drained.returncode == 0 and f"{name} has left" in drained.stdout, drained.stderr
    cluster.processes.wait_exit(name, 20.0)
    assert cluster.processes.members[name].exit_code == 0


def come_back(cluster: ChaosCluster) -> None:
    """Restart ended processes and wait until the cluster is as before."""
    for name in cluster.processes.members:
        if not cluster.processes.alive(name):
            cluster.processes.restart(name)
    cluster.wait_recovered(30)
    cluster.load.pause(PATIENCE_S + 10)
    cluster.load.take_answers()
    wait_until(lambda: not cluster.not_whole(), 15, lambda: "; ".join(cluster.not_whole()))


@pytest.mark.parametrize("name", ["D0", pytest.param("P0", marks=pytest.mark.by_hand)])
def test_chitu_drain_under_load_costs_no_request(cluster: ChaosCluster, name: str) -> None:
    cluster.load.resume()
    sent = send_long(cluster)
    wait_decoding_on(cluster, name)
    drain(cluster, name)
    finish(cluster, sent)


def test_a_drain_ends_though_a_peer_that_was_writing_is_stopped(cluster: ChaosCluster) -> None:
    cluster.hold("transfer")
    sent = cluster.load.send([short_ask(random.Random(n)) for n in range(8)])

    def is_writing() -> bool:
        pairs = [(r.prefill, r.decode) for r in cluster.snapshot().requests if r.state == "prefill"]
        return ("P0", "D0") in pairs and bool(cluster.loads()["D0"].transferring)

    wait_until(is_writing, 15, lambda: str(cluster.loads()))
    cluster.strike("SIGSTOP", "P0")
    try:
        cluster.release()
        drain(cluster, "D0")
        assert "leaving without an answer from a peer" in cluster.processes.logs("D0")
    finally:
        cluster.processes.kill("P0", signal.SIGCONT)
    finish(cluster, sent)


@pytest.mark.parametrize("name", ["D1", pytest.param("P1", marks=pytest.mark.by_hand)])
def test_an_instance_that_is_told_to_end_under_load_finishes_what_it_runs(cluster: ChaosCluster, name: str) -> None:
    cluster.load.resume()
    seen = len(cluster.processes.logs("router"))  # the request ids of the previous case are used again
    sent = send_long(cluster)
    running = [request for request in wait_decoding_on(cluster, name) if "long" in request]
    cluster.processes.kill(name, signal.SIGTERM)
    cluster.processes.wait_exit(name, 30.0)
    assert cluster.processes.members[name].exit_code == 0
    finish(cluster, sent)
    log = cluster.processes.logs("router")[seen:]
    retried = re.findall(r"request (long-\d): attempt 1 on P\d-D1 failed", log)
    assert not set(retried) & set(running), f"there was time to finish:\n{log}"


def test_a_router_that_is_told_to_end_finishes_what_runs_and_its_successor_finds_everyone(
    cluster: ChaosCluster,
) -> None:
    sent = send_long(cluster)
    wait_decoding_on(cluster, "D0")
    pids = {name: cluster.processes.pid(name) for name in ("P0", "P1", "D0", "D1")}
    cluster.processes.kill("router", signal.SIGTERM)
    cluster.processes.wait_exit("router", 30.0)
    assert cluster.processes.members["router"].exit_code == 0
    finish(cluster, sent)
    come_back(cluster)
    assert {name: cluster.processes.pid(name) for name in pids} == pids


def wait_held_on(cluster: ChaosCluster, name: str) -> None:
    """Wait until several heartbeats in a row of an instance report a transfer: reports from before the hold, of a
    transfer that went through, are over by then."""
    busy_since_s = time.monotonic()

    def is_held() -> bool:
        nonlocal busy_since_s
        if not cluster.loads()[name].transferring:
            busy_since_s = time.monotonic()
        return time.monotonic() - busy_since_s > 1.5

    wait_until(is_held, 15, lambda: f"a transfer of {name} that is held")


@pytest.mark.parametrize("name", ["D0", pytest.param("P0", marks=pytest.mark.by_hand)])
def test_what_outlasts_the_drain_goes_on_elsewhere(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("short") / "c"
    # The queue behind the hold delays a request less than its deadlines: no request is rejected.
    settings = [f"{DEADLINES}.{name}" for name in (f"drain_s={SHORT_DRAIN_S}", "queue_s=60", "transfer_s=60")]
    with ChaosCluster(folder, *settings) as cluster:
        cluster.load.resume()
        if name == "P0":  # a prompt that P cannot finish in time
            cluster.hold("transfer")
        sent = send_long(cluster)
        if name == "P0":
            wait_held_on(cluster, name)
        else:
            wait_decoding_on(cluster, name)
        cluster.processes.kill(name, signal.SIGTERM)
        cluster.processes.wait_exit(name, 30.0)
        cluster.release()
        finish(cluster, sent)
        pair = r"P\d-D0" if name == "D0" else r"P0-D\d"
        assert re.search(rf"request \S+: attempt 1 on {pair} failed after", cluster.processes.logs("router"))
        come_back(cluster)
