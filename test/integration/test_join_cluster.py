"""`chitu join`: a running 1P1D grows by an instance, on its own machine and from another; all answers are the same."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from network import Network
from nursery import FORKED
from nursery import chitu as forked_chitu
from ports import free_ports
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.config.cluster_key import with_cluster_key
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.process.child import ChildProcess, ProcessSpec
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
CHITU = [sys.executable, "-m", "chitu.cli"]
KEY = "of this cluster 0123456789"
PORTS = ("port", "stats_port", "token_port", "pd_disaggregation.coordination_port")
PORTS += ("pd_disaggregation.metadata_sync_port", "pd_disaggregation.bootstrap_port")
SIZES = ["cache.num_pages=64", "model.max_model_len=256", "scheduler.threads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def answer(url: str) -> tuple[int, ...]:
    body = {"model": "tiny", "prompt": list(range(300, 340)), "max_tokens": 6, "return_token_ids": True}
    body |= {"temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return tuple(json.load(reply)["choices"][0]["token_ids"])


def pairs(url: str) -> set[tuple[str | None, str | None]]:
    return {(request.prefill, request.decode) for request in RouterClient(url).cluster().requests}


def chitu(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHITU, *words], capture_output=True, text=True, timeout=60, check=False)


def test_one_command_adds_instances_to_a_local_cluster_and_two_at_one_moment_become_two(
    model: Path, tmp_path: Path
) -> None:
    """They share one folder of logs."""
    overrides = [f"model.path={model}", *SIZES]
    topology = load_topology("pd_disagg_1p1d_local", overrides)
    with LocalCluster(topology, entries=FORKED) as cluster, ExitStack() as stack:
        cluster.wait_ready()
        expected = answer(cluster.url)
        joined = {}
        roles = ("prefill", "decode", "decode")
        words = ["--url", cluster.url, "--log-dir", str(tmp_path)]
        for process in [
            stack.enter_context(ServeProcess([*CHITU, "join", role, *words], popen=forked_chitu)) for role in roles
        ]:
            name = process.wait_line(f"([PD][0-9]+) is ready: .* joined {cluster.url}", timeout_s=120)[1]
            joined[name] = process
        assert sorted(joined) == ["D1", "D2", "P1"]
        for _ in range(12):
            assert answer(cluster.url) == expected
        assert pairs(cluster.url) == set(itertools.product(("P0", "P1"), ("D0", "D1", "D2")))

        taken = chitu("join", "decode", "--rank", "1", "--url", cluster.url)
        assert (taken.returncode, taken.stderr) == (
            2,
            "chitu: D1 is in the cluster: drain it first, or give another --rank\n",
        )

        assert chitu("drain", "D1", "--url", cluster.url).returncode == 0
        assert joined["D1"].process.wait(60) == 0
        assert [joined[name].signal_and_wait(signal.SIGTERM) for name in ("P1", "D2")] == [0, 0]
        wait_until(cluster.ready, 10, "the pair of the beginning")
        assert answer(cluster.url) == expected


def test_an_added_instance_ends_after_its_cluster_and_one_of_the_topology_waits(model: Path, tmp_path: Path) -> None:
    deadlines = "dp_config.router.pd_disaggregation.deadlines"
    settings = [f"model.path={model}", f"{deadlines}.router_s=0.1", f"{deadlines}.heartbeat_interval_s=0.1", *SIZES]
    settings += [f"dp_config.router.{key}={port}" for key, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
    argv = [sys.executable, "-m", "chitu.serve.scheduler", "--role", "decode", "--rank", "0", *settings]
    waits, added = (
        ChildProcess(
            ProcessSpec("D0", "127.0.0.1", (*argv, *words)),
            {},
            tmp_path / f"{len(words)}",
            f"{len(words)}/D0",
            FORKED.popen,
        )
        for words in ((), ("--if-free",))
    )
    try:
        wait_until(lambda: added.exit_code() is not None, 90, "the end of the added one")
        assert (added.exit_code(), waits.exit_code()) == (1, None), [*added.tail(), *waits.tail()]
        assert any(
            "nothing received from the router for 2 s: this added instance ends" in line for line in added.tail()
        )
    finally:
        added.kill_tree()
        waits.kill_tree()


def node(model: Path, host: str) -> list[str]:
    """Return the command line of a whole 1P1D that other machines can reach."""
    ports = [f"{key}={port}" for key, port in zip(PORTS, (21003, *range(29600, 29605)), strict=True)]
    hosts = [f"{key}host={host}" for key in ("", "prefill_schedulers.0.", "decode_schedulers.0.")]
    words = [f"dp_config.router.{word}" for word in (*hosts, *ports)]
    return [*CHITU, "node", "pd_disagg_1p1d_local", "--node-index", "0", f"model.path={model}", *words, *SIZES]


def start(stack: ExitStack, argv: Sequence[str], cwd: Path) -> ServeProcess:
    return stack.enter_context(ServeProcess(argv, {"CHITU_CLUSTER_KEY": KEY}, cwd, forked_chitu))


def test_one_command_adds_a_decode_instance_of_another_machine(model: Path, tmp_path: Path) -> None:
    with Network(["first", "second"]) as network, ExitStack() as stack:
        address = network.address("first")
        url = f"http://{address}:21003"
        cluster = start(stack, network.argv("first", node(model, address)), tmp_path)
        cluster.wait_line("Ctrl-C ends it", timeout_s=120)
        argv = [*CHITU, "join", "decode", "--url", url]
        process = start(stack, network.argv("second", argv), tmp_path)
        process.wait_line(f"D1 is ready: D1 joined {url}", timeout_s=120)
        with network.inside("second"):
            snapshot = RouterClient(url).cluster()
            assert {i.name: i.host for i in snapshot.instances}["D1"] == network.address("second")
            assert len({answer(url) for _ in range(4)}) == 1
            assert pairs(url) == {("P0", "D0"), ("P0", "D1")}
        assert process.signal_and_wait(signal.SIGTERM) == 0
        assert cluster.signal_and_wait(signal.SIGTERM) == 0


def test_a_cluster_on_a_loopback_address_says_that_other_machines_cannot_join(model: Path, tmp_path: Path) -> None:
    with Network(["first", "second"]) as network, ExitStack() as stack:
        words = [f"model.path={model}", "dp_config.router.http_host=0.0.0.0", *SIZES]
        topology = with_cluster_key(load_topology("unified_local", words), KEY)
        with network.inside("first"):
            cluster = stack.enter_context(LocalCluster(topology, entries=FORKED))
            cluster.wait_ready()
        url = f"http://{network.address('first')}:{cluster.ports['port']}"
        process = start(stack, network.argv("second", [*CHITU, "join", "unified", "--url", url]), tmp_path)
        process.wait_line("only instances on its own machine")
        assert process.process.wait(60) == 2
