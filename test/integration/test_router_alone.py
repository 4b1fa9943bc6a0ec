"""A router on a node of its own: its end, in which no client is left without an answer, and a cluster that begins with
it alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from network import Network
from nursery import FORKED, chitu, forked_router
from serve_process import ServeProcess
from support.router_process import RouterUnderTest, wait_until
from tls_proxy import CERTIFICATE, tls_proxy

from chitu.config.cluster_key import ENVIRONMENT_KEY, cluster_key_of
from chitu.config.load import parse_topology
from chitu.config.schema import Topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0
ONE_TOKEN = {"prompt": [5, 6, 7], "max_tokens": 1}
SIZES = {"cache": {"num_pages": 64}, "scheduler": {"threads": 1}}
CHITU = [sys.executable, "-m", "chitu.cli"]
LONG = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def router_alone(model: Path, deadlines: Mapping[str, float] = {}, **more: Any) -> Topology:
    ports = {"stats_port": 0, "token_port": 0}
    pd = {"coordination_port": 0, "metadata_sync_port": 0, "bootstrap_port": 0, "deadlines": deadlines}
    router = {**ports, "pd_disaggregation": pd}
    named = {"path": str(model), "served_name": "m"}
    return parse_topology({"model": named, "dp_config": {"router": router}, **more})


@contextmanager
def fake_pair(cluster: LocalCluster) -> Iterator[None]:
    """Run a P and a D that the cluster's launcher did not start, with a token every half second, while it is open."""
    argv = [sys.executable, "-m", "support.fake_worker", "--instances", "P0,D0", "--host", "127.0.0.1"]
    for name in ("coordination_port", "metadata_sync_port", "stats_port", "token_port"):
        argv += ["--" + name.replace("_", "-"), str(cluster.ports[name])]
    environment = {**os.environ, ENVIRONMENT_KEY: cluster_key_of(cluster.topology)}
    worker = FORKED.popen([*argv, "--step-s", "0.5"], env=environment)
    try:
        wait_until(lambda: health(cluster.url).status_code == 200, WAIT_S, "the pair to join")
        yield
    finally:
        worker.kill()
        worker.wait()


def health(url: str) -> httpx.Response:
    return httpx.get(f"{url}/health", timeout=10.0, trust_env=False)


def complete(url: str, **options: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**LONG, **options}, timeout=WAIT_S, trust_env=False)


def test_a_router_alone_says_that_nothing_can_be_served(model: Path) -> None:
    with LocalCluster(router_alone(model), entries=FORKED) as cluster:
        cluster.wait_ready()
        answer = health(cluster.url)
        assert (answer.status_code, answer.json()["reason"]) == (503, "no prefill and no decode instance is ready")
        refused = complete(cluster.url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_instance")


def test_a_router_without_workers_of_its_own_answers_every_client_before_it_ends(model: Path) -> None:
    """Its workers are on other nodes, so its launcher has nobody else to leave time to."""
    with LocalCluster(router_alone(model, {"drain_s": 2.0}), entries=FORKED) as cluster:
        cluster.wait_ready()
        with fake_pair(cluster), ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(complete, cluster.url, stream=number % 2 == 1) for number in range(8)]
            wait_until(lambda: health(cluster.url).json()["in_flight"] == 8, WAIT_S, "eight requests")
            codes = cluster.stop()
            answers = [one.result() for one in asked]
        assert codes == {"router": 0}
        for number, answer in enumerate(answers):
            assert answer.status_code == (200 if number % 2 else 503)
            assert '"code":"no_instance"' in answer.text.strip().splitlines()[-1].replace(" ", "")


def test_a_pair_joins_a_router_that_began_alone(model: Path) -> None:
    """The topology has no instance that the new ones could be like."""
    with LocalCluster(router_alone(model, **SIZES), entries=FORKED) as cluster, ExitStack() as stack:
        cluster.wait_ready()
        for role in ("prefill", "decode", "unified"):
            stack.enter_context(ServeProcess([*CHITU, "join", role, "--url", cluster.url], popen=chitu))
        wait_until(lambda: len(health(cluster.url).json()["instances"]) == 3, 120.0, lambda: health(cluster.url).text)
        assert (answer := complete(cluster.url, max_tokens=4)).status_code == 200, answer.text
        stack.enter_context(ServeProcess([*CHITU, "drain", "U0", "--url", cluster.url], popen=chitu))
        wait_until(lambda: len(health(cluster.url).json()["instances"]) == 2, 60.0, lambda: health(cluster.url).text)
        answer = complete(cluster.url, max_tokens=4, return_proof=True)
        assert (answer.status_code, answer.headers["x-chitu-decode"]) == (200, "D0"), answer.text


def test_what_runs_in_a_container_is_drained_without_its_name(model: Path, tmp_path: Path) -> None:
    """A pod that joined does not know its rank. Its temporary folder is its own."""
    with LocalCluster(router_alone(model, **SIZES), entries=FORKED) as cluster, ExitStack() as stack:
        cluster.wait_ready()
        pods = [{"TMPDIR": str(tmp_path / name)} for name in ("first", "second", "empty")]
        for pod in pods:
            Path(pod["TMPDIR"]).mkdir()
        words = [*CHITU, "join", "unified", "--url", cluster.url, "dp_config.probe_port=0"]
        key = {ENVIRONMENT_KEY: cluster_key_of(cluster.topology)}
        joined = [stack.enter_context(ServeProcess(words, {**pod, **key}, popen=chitu)) for pod in pods[:2]]
        names = [pod.wait_line(r"(U\d) is ready", timeout_s=120)[1] for pod in joined]
        for pod in joined:  # one that has lost the race for U0 has started again, with another free port
            port = re.findall(r"probes: .* on port (\d+)", "\n".join(pod.lines))[-1]
            wait_until(
                lambda port=port: httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60.0).status_code == 200,
                WAIT_S,
                port,
            )

        def drain_self(pod: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
            argv = [*CHITU, "drain", "--self", *options]
            return subprocess.run(argv, env={**os.environ, **pod}, capture_output=True, text=True, check=False)

        drained = drain_self(pods[0])
        assert drained.returncode == 0 and f"{names[0]} has left" in drained.stdout, drained.stderr
        assert joined[0].process.wait(WAIT_S) == 0 and joined[1].process.poll() is None
        last = drain_self(pods[1])
        assert (last.returncode, "--force" in last.stderr) == (1, True)
        assert drain_self(pods[1], "--force").returncode == 0 and joined[1].process.wait(WAIT_S) == 0
        absent = drain_self(pods[2])
        assert (absent.returncode, "no launcher of this user runs here" in absent.stderr) == (2, True)


def test_an_instance_joins_and_is_drained_through_a_proxy_with_tls_and_a_path(model: Path) -> None:
    with LocalCluster(router_alone(model, **SIZES), entries=FORKED) as cluster, ExitStack() as stack:
        cluster.wait_ready()
        url = stack.enter_context(tls_proxy(cluster.ports["port"]))
        trusted = {"SSL_CERT_FILE": str(CERTIFICATE), ENVIRONMENT_KEY: cluster_key_of(cluster.topology)}
        joined = stack.enter_context(ServeProcess([*CHITU, "join", "unified", "--url", url], trusted, popen=chitu))
        joined.wait_line(f"U0 is ready: U0 joined {url}", timeout_s=120)
        words = [*CHITU, "drain", "U0", "--url", url]
        last = subprocess.run(words, env={**os.environ, **trusted}, capture_output=True, text=True, check=False)
        assert (last.returncode, "`chitu drain U0 --force`" in last.stderr) == (1, True), last.stderr
        assert subprocess.run([*words, "--force"], env={**os.environ, **trusted}, check=False).returncode == 0
        assert joined.process.wait(WAIT_S) == 0


def test_a_node_starts_while_the_names_of_others_have_no_address(model: Path, tmp_path: Path) -> None:
    """Pods of a first roll-out, and a router that starts again while one of them is away."""
    ports = {name: port for port, name in enumerate(("stats_port", "token_port"), 29600)}
    pd = {"coordination_port": 29602, "metadata_sync_port": 29603, "bootstrap_port": 29604}
    router = {**ports, "pd_disaggregation": pd, "host": "r.example", "unified_schedulers": [{"host": "u.example"}]}
    config = {"model": {"path": str(model), "served_name": "m"}, "dp_config": {"router": router}, **SIZES}
    (tmp_path / "t.yaml").write_text(msgspec.json.encode(config).decode())
    with Network(["first", "second"]) as network, ExitStack() as stack:
        first, second = network.address("first"), network.address("second")

        def node(host: str, index: int, hosts: str) -> ServeProcess:
            words = [*CHITU, "node", str(tmp_path / "t.yaml"), "--hosts", hosts, "--node-index", str(index)]
            argv = network.argv(host, words)
            return stack.enter_context(
                ServeProcess(argv, {ENVIRONMENT_KEY: "of this cluster 0123456789"}, tmp_path, chitu)
            )

        alone = node("second", 1, f"absent.invalid,{second}")
        served = node("first", 0, f"{first},absent.invalid")
        alone.wait_line("U0: ready", timeout_s=120)
        with network.inside("first"):
            assert health(f"http://{first}:21003").status_code == 503
        assert alone.signal_and_wait(signal.SIGTERM) == 0
        joined = node("second", 1, f"{first},{second}")
        served.wait_line("Ctrl-C ends it", timeout_s=120)
        with network.inside("first"):
            assert complete(f"http://{first}:21003", max_tokens=4).status_code == 200
        assert joined.signal_and_wait(signal.SIGTERM) == served.signal_and_wait(signal.SIGTERM) == 0


def test_pods_start_in_any_order_and_each_is_drained_by_its_hook(model: Path, tmp_path: Path) -> None:
    """The commands of the chart; each host has its own temporary folder, as a container has."""
    with Network(["router", "prefill", "decode"]) as network, ExitStack() as stack:
        url = f"http://{network.address('router')}:21003"

        def environment(host: str) -> dict[str, str]:
            (tmp_path / host).mkdir(exist_ok=True)
            return {ENVIRONMENT_KEY: "of this cluster 0123456789", "TMPDIR": str(tmp_path / host)}

        def pod(host: str, *words: str) -> ServeProcess:
            argv = network.argv(host, [*CHITU, *words, "--log-dir", "-", "dp_config.probe_port=9000"])
            return stack.enter_context(ServeProcess(argv, environment(host), tmp_path, chitu))

        def is_ready(host: str) -> bool:
            with network.inside(host), contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://{network.address(host)}:9000/readyz", timeout=5.0).status_code == 200
            return False

        pods = {role: pod(role, "join", role, "--url", url) for role in ("prefill", "decode")}
        for each in pods.values():
            each.wait_line("trying again for 600 s")
        own = ["--hosts", network.address("router"), "--node-index", "0", "--model", str(model)]
        pods["router"] = pod("router", "node", "router_alone", *own, "cache.num_pages=64", "scheduler.threads=1")
        for host, each in pods.items():
            wait_until(lambda host=host: is_ready(host), 120.0, lambda each=each: each.lines)
        with network.inside("router"):
            assert httpx.post(f"{url}/v1/completions", json=ONE_TOKEN, timeout=WAIT_S).status_code == 200
        for host in ("prefill", "decode"):
            hook = network.argv(host, [*CHITU, "drain", "--self", "--force"])
            assert subprocess.run(hook, env={**os.environ, **environment(host)}, check=False).returncode == 0
            assert pods[host].process.wait(WAIT_S) == 0
        assert pods["router"].signal_and_wait(signal.SIGTERM) == 0
        for each in pods.values():
            assert all(line.startswith(("{", "no router", "the connection")) for line in each.lines), each.lines


def test_an_instance_that_joined_finds_the_router_at_another_address(model: Path, tmp_path: Path) -> None:
    """Its name stands for the address of its pod. The instance keeps its process, and so its caches."""
    hosts = tmp_path / "hosts"
    with Network(["first", "second", "third"]) as network, ExitStack() as stack:
        environment = {ENVIRONMENT_KEY: "of this cluster 0123456789"}

        def router(host: str) -> ServeProcess:
            hosts.write_text(f"127.0.0.1 localhost\n{network.address(host)} router.test\n")
            own = ["--hosts", network.address(host), "--node-index", "0", "--model", str(model)]
            argv = [*CHITU, "node", "router_alone", *own, "cache.num_pages=64", "scheduler.threads=1"]
            return stack.enter_context(ServeProcess(network.argv(host, argv), environment, tmp_path, chitu))

        def serves(host: str) -> bool:
            with network.inside(host), contextlib.suppress(httpx.TransportError):
                return health(f"http://{network.address(host)}:21003").status_code == 200
            return False

        before = router("first")
        join = [*CHITU, "join", "unified", "--url", "http://router.test:21003"]
        own_hosts = ["unshare", "-m", "bash", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "-", *join]
        joined = stack.enter_context(ServeProcess(network.argv("third", own_hosts), environment, tmp_path))
        joined.wait_line("U0 is ready: U0 joined http://router.test:21003", timeout_s=120)
        assert before.signal_and_wait(signal.SIGTERM) == 0
        router("second")
        wait_until(lambda: serves("second"), 120.0, lambda: joined.lines)
        assert joined.process.poll() is None
        assert joined.signal_and_wait(signal.SIGTERM) == 0


def test_a_router_that_is_to_end_serves_on_until_a_balancer_has_noticed(model: Path, tmp_path: Path) -> None:
    """A second signal ends the wait."""
    delay = "dp_config.router.pd_disaggregation.deadlines.drain_delay_s=600"
    router: RouterUnderTest = forked_router(tmp_path, model, ("model.served_name=m", delay))

    try:
        router.start()
        router.start_worker("P0,D0")
        assert health(router.url).status_code == 200
        router.signal(signal.SIGTERM)
        wait_until(lambda: health(router.url).status_code == 503, WAIT_S, "it to notice")
        assert health(router.url).json()["status"] == "ending"
        assert complete(router.url, max_tokens=4).status_code == 200
        router.signal(signal.SIGTERM)
        assert router.process.wait(WAIT_S) == 0
    except subprocess.TimeoutExpired:
        raise AssertionError(router.log) from None
    finally:
        router.stop()
