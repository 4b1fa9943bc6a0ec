"""`chitu explain` on real clusters, each with a different bottleneck: it finds that one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from chaos_cluster import VOCAB_SIZE, right_tokens
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.faults import ENVIRONMENT
from support.router_process import wait_until
from support.steady_load import Ask, SteadyLoad

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tools.explain import Explanation, explain

ROUTER = "dp_config.router"
SEEN_S = 1.0
"""Minimum time for which a cluster is watched."""
WATCH_S = 60.0
LOOKS = 3
"""Number of tries: a busy machine may itself be the bottleneck for a second."""


@dataclass(frozen=True)
class Planted:
    """A 2P2D cluster with a planted bottleneck, and the load that meets it."""

    code: str
    says: str = ""
    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: tuple[str, ...] = ()
    faults: dict[str, float] = field(default_factory=dict)
    clients: int = 4
    prompt: int = 40
    tokens: int = 8
    ended: int = 24
    """Minimum number of requests that end while the cluster is watched."""


DEADLINES = f"{ROUTER}.pd_disaggregation.deadlines"
PLANTED = {
    "P computes slowly": Planted("prefill_compute", engine=EngineConfig(0.0, 0.001), clients=1),
    "one slow P": Planted("prefill_instance", "P1 takes", EngineConfig(0.0, 0.001, slow={"P1": 8.0}), clients=2),
    "one slow D": Planted("decode_instance", "D0 takes", EngineConfig(0.004, slow={"D0": 6.0}), clients=4, tokens=20),
    "a slow link": Planted("transfer", faults={"delay_ms": 60}),
    "writes that hang": Planted(
        "failures", "transfer_", settings=(f"{DEADLINES}.transfer_s=0.5",), faults={"stall_every": 9}
    ),
    "a small pool of D": Planted(
        "pages",
        engine=EngineConfig(0.002),
        settings=(f"{ROUTER}.decode_schedulers=[{{num_pages: 64}}, {{num_pages: 64}}]",),
        **{"clients": 40, "prompt": 60, "tokens": 200},
    ),
    "few running requests": Planted(
        "running_requests",
        engine=EngineConfig(0.004),
        settings=("scheduler.max_running_requests=1", "cache.num_aux_slots=16"),
        **{"clients": 16, "tokens": 12},
    ),
    "few logits rows": Planted(
        "logits_slots",
        engine=EngineConfig(0.001, 0.0005),
        settings=("scheduler.max_running_requests=16", "cache.num_aux_slots=1"),
        **{"clients": 24, "tokens": 2},
    ),
    "few state rows": Planted(
        "state_slots",
        engine=EngineConfig(0.004, has_state=True),
        settings=("scheduler.max_running_requests=16", "cache.num_state_slots=1"),
        **{"clients": 16, "tokens": 12},
    ),
    "nothing but tokens": Planted("decode", engine=EngineConfig(0.004), tokens=60),
}


@contextmanager
def serving(folder: Path, planted: Planted) -> Iterator[tuple[LocalCluster, SteadyLoad]]:
    model = make_checksum_model(folder / "model", planted.engine)
    settings = [
        *(f"model.path={model}", "model.served_name=m", "model.max_model_len=1024", "cache.num_pages=2000"),
        *(f"{ROUTER}.{role}_schedulers=[{{}}, {{}}]" for role in ("prefill", "decode")),
        *("cache.prefix_cache=false", f"{ROUTER}.pd_disaggregation.transport=shm"),
        *(f"{DEADLINES}.heartbeat_interval_s=0.1", f"{ROUTER}.policy=round_robin"),  # so a slow one gets its share
        *planted.settings,
    ]
    topology = load_topology("pd_disagg_1p1d_local.yaml", settings)

    def next_ask(rng: random.Random) -> Ask:
        return Ask(tuple(rng.randrange(16, VOCAB_SIZE) for _ in range(planted.prompt)), planted.tokens)

    env = {ENVIRONMENT: json.dumps(planted.faults)}
    with LocalCluster(
        topology, entries=forked(ENTRIES), log_dir=str(folder / "logs"), restart=False, env=env
    ) as cluster:
        cluster.wait_ready(60)
        load = SteadyLoad(lambda: cluster.url, "m", next_ask, right_tokens, 120.0)
        try:
            load.start(planted.clients)
            yield cluster, load
        finally:
            load.close()


def watch(cluster: LocalCluster, num_ended: int) -> tuple[Explanation, list[ClusterSnapshot]]:
    """Watch until enough requests have ended; return the explanation and the snapshots."""
    client, snapshots = RouterClient(cluster.url), list[ClusterSnapshot]()

    def is_enough() -> bool:
        snapshots.append(client.cluster())
        seen = explain(snapshots)
        return seen.num_ended >= num_ended and seen.span_s >= SEEN_S

    wait_until(is_enough, WATCH_S, lambda: f"{explain(snapshots)}")
    return explain(snapshots), snapshots


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bottleneck_is_found(name: str, tmp_path: Path) -> None:
    planted = PLANTED[name]
    with serving(tmp_path, planted) as (cluster, _):
        for _ in range(LOOKS):
            found, _ = watch(cluster, planted.ended)
            if found.bottleneck == planted.code:
                break
    assert found.bottleneck == planted.code and planted.says in found.says, msgspec.json.encode(found).decode()
    assert sum(stage.share for stage in found.stages) == pytest.approx(1.0)


def test_a_slow_router_and_a_dead_role_are_found_by_the_command_and_in_its_file(tmp_path: Path) -> None:
    saved = str(tmp_path / "seen.jsonl")

    def command(*arguments: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "chitu.cli", "explain", *arguments, "--json"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    with serving(tmp_path, Planted("router", tokens=3)) as (cluster, load):
        member, ended = cluster.members["router"].child, threading.Event()
        assert member is not None

        def slow_down() -> None:
            """Give the process a tenth of the time."""
            while not ended.wait(0.005):
                os.kill(member.pid, signal.SIGSTOP)
                ended.wait(0.045)
                os.kill(member.pid, signal.SIGCONT)

        slower = threading.Thread(target=slow_down)
        slower.start()
        try:
            assert command(cluster.url, "--seconds", "3", "--save", saved)["bottleneck"] == "router"
        finally:
            ended.set()
            slower.join()
        assert command(saved)["bottleneck"] == "router"
        load.pause(60)
        for name in ("D0", "D1"):
            cluster.kill(name, signal.SIGKILL)
        wait_until(lambda: watched(cluster)["bottleneck"] == "no_instance", 30, lambda: watched(cluster))


def watched(cluster: LocalCluster) -> dict[str, str]:
    found = explain([RouterClient(cluster.url).cluster()])
    return {"bottleneck": found.bottleneck, "says": found.says}
