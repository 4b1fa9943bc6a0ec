"""Groups on several hosts, which are network namespaces: answers, cut, silent and lossy links, and late processes."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import complete_all
from engine_checkpoints import Engine, generate
from host_cluster import CONFIG, KEY, RENDEZVOUS_PORT, HostCluster
from network import Network
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.fake.executor import expected_tokens
from chitu.net.process_deaths import pid_alive
from chitu.tools.make_model import ModelShape, make_model

pytestmark = pytest.mark.timeout(300)
OUTPUT_TOKENS = 10
GREEDY: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
SIZES = ["cache.num_pages=300", "scheduler.threads=1"]


def prompts_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, 480) for _ in range(length)] for length in lengths]


def group_on(net: Network, names: list[str], dp_size: int, more: str = "") -> str:
    hosts = ", ".join(map(net.address, names))
    return f"{{hosts: [{hosts}], dp_size: {dp_size}, rendezvous_port: {RENDEZVOUS_PORT}{more}}}"


@pytest.mark.parametrize(
    ("dp_size", "tp_size", "experts"), [(2, 1, "cut"), (4, 1, "cut"), (2, 2, "cut"), (2, 1, "spread"), (2, 2, "spread")]
)
def test_members_on_two_hosts_give_the_tokens_of_one_engine(
    tmp_path: Path, dp_size: int, tp_size: int, experts: str
) -> None:
    names, model = ["r", "a", "b"], TINY_MODEL_DIR
    if experts == "spread":
        shape = ModelShape(layers=2, max_position_embeddings=512, hidden_size=64)
        model = make_model(tmp_path / "experts", "qwen3_moe", shape)
    with Network(names) as net:
        devices = f", experts: {experts}, tp_size: {tp_size}, devices: [{', '.join(['cpu'] * dp_size * tp_size)}]"
        settings = [f"model.path={model}", "model.served_name=m", *SIZES, f"{CONFIG}.policy=round_robin"]
        settings += [f"{CONFIG}.prefill_schedulers=[{{host: {net.address('r')}, devices: [cpu]}}]"]
        settings += [f"{CONFIG}.decode_schedulers=[{group_on(net, ['a', 'b'], dp_size, devices)}]"]
        with HostCluster(tmp_path, net, names, settings) as cluster:
            prompts = prompts_of((1, 20, 65, 150), 7)
            expected = generate(Engine(model, max_model_len=512), prompts, OUTPUT_TOKENS)
            answers = complete_all(cluster.url, prompts * 2, [GREEDY] * 8)
            assert [answer.token_ids for answer in answers] == expected * 2
            hosts = {i.name: i.host for i in cluster.client.cluster().instances if i.role == "decode"}
            assert sorted(hosts.values()) == sorted([net.address("a"), net.address("b")] * (dp_size // 2))
            used = {request.decode for request in cluster.client.cluster().requests}
            assert used == {*hosts}


# --------------------------------------------------------------------------------------------------- links that fail

LEASE_S = 3.0
DEADLINES = f"{{heartbeat_interval_s: 0.2, lease_s: {LEASE_S}, transfer_s: 5, bootstrap_s: 5, queue_s: 5}}"
VOCAB_SIZE = 1280
PATIENCE_S = 40.0
"""Longest time that a request may take whatever happens: less than the timeout of a collective."""


class Links:
    """P0, P1 and D2 beside the router, and the group D0, D1 on hosts of their own; checksum engines."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.net = net
        model = make_checksum_model(folder / "model", EngineConfig(0.01, 0.0002))
        here = f"{{host: {net.address('r')}, devices: [cpu]}}"
        settings = [f"model.path={model}", "model.served_name=m", "scheduler.max_running_requests=16", *SIZES]
        settings += [f"{CONFIG}.prefill_schedulers=[{here}, {here}]", f"{CONFIG}.policy=round_robin"]
        settings += [f"{CONFIG}.decode_schedulers=[{group_on(net, ['a', 'b'], 2, ', devices: [cpu, cpu]')}, {here}]"]
        settings += [f"{CONFIG}.pd_disaggregation.deadlines={DEADLINES}"]
        settings += [f"{CONFIG}.breaker={{open_s: 1, max_open_s: 1}}"]
        self.cluster = HostCluster(folder, net, ["r", "a", "b"], settings, ENTRIES)

    def ask(self, seed: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return the tokens of an answer, and those that are right."""
        prompt = random.Random(seed).choices(range(16, VOCAB_SIZE), k=150)
        body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        reply = httpx.post(f"{self.cluster.url}/v1/completions", json=body, trust_env=False, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"], expected_tokens(prompt, num_tokens, VOCAB_SIZE)

    def during(self, seed: int, num_tokens: int, blow: Callable[[], object]) -> list[str]:
        """Have twelve requests decode, four on each D, and strike. Check every answer; return where each went."""
        with ThreadPoolExecutor(12) as pool:
            before = {request.request_id for request in self.cluster.client.cluster().requests}
            asked = [pool.submit(self.in_net, seed + number, num_tokens) for number in range(12)]
            wait_until(lambda: {"D0", "D1"} <= self.decoding(), 30, self.cluster.said)
            blow()
            for future in asked:
                found, right = future.result()
                assert found == right
        requests = self.cluster.client.cluster().requests
        return [str(r.decode) for r in requests if r.request_id not in before and r.state == "finished"]

    def in_net(self, seed: int, num_tokens: int) -> tuple[list[int], list[int]]:
        with self.net.inside("r"):
            return self.ask(seed, num_tokens)

    def decoding(self) -> set[str]:
        running = [r for r in self.cluster.client.cluster().requests if r.ended_at_s is None]
        return {str(r.decode) for r in running if r.state == "decode" and r.output_tokens > 2}

    def counted(self, name: str) -> float:
        text = httpx.get(f"{self.cluster.url}/metrics", trust_env=False, timeout=60.0).text
        return sum(float(number) for number in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def wait_back(self, before: Mapping[str, str], new: set[str]) -> None:
        """Wait until all serve, these under new incarnations and the others under their old ones."""

        def is_back() -> bool:
            after = self.cluster.up()
            return len(after) == len(before) and {name for name in after if after[name] != before[name]} == new

        wait_until(is_back, 60, self.cluster.said)


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Links]:
    with Network(["r", "a", "b"]) as net:
        links = Links(tmp_path_factory.mktemp("links"), net)
        with links.cluster:
            yield links


def test_a_killed_member_ends_the_other_hosts_part_at_once_and_both_meet_again(links: Links) -> None:
    before = links.cluster.up()
    pids = {i.name: i.pid for i in links.cluster.client.cluster().instances}

    def kill() -> None:
        os.kill(pids["D1"], signal.SIGKILL)
        after_s = wait_until(lambda: not pid_alive(pids["D0"]), 20, "the end of the other part")
        assert after_s < LEASE_S / 2, "a broken connection is no silence"

    assert "D2" in links.during(100, 120, kill)
    assert links.counted("chitu_requests_failed") == 0, "no request is poison"
    links.wait_back(before, {"D0", "D1"})
    assert "the part of this group on" in links.cluster.log("D0")


@pytest.mark.parametrize("link", ["cut", pytest.param("silent", marks=pytest.mark.by_hand)])
def test_a_host_that_is_not_heard_is_one_accident_and_the_group_comes_back(links: Links, link: str) -> None:
    """Cut: the host reaches nobody. Silent: the group's hosts do not reach each other."""
    before, struck_s = links.cluster.up(), 0.0
    pids = {i.name: i.pid for i in links.cluster.client.cluster().instances}

    def strike() -> None:
        nonlocal struck_s
        struck_s = time.monotonic()
        if link == "cut":
            links.net.isolate("b")
        else:
            links.net.drop("a", "b")

    try:
        links.during(200, 400, strike)
        wait_until(lambda: not {"D0", "D1"} & {*links.cluster.up()}, 20, links.cluster.said)
        wait_until(lambda: not any(pid_alive(pids[name]) for name in ("D0", "D1")), 20, "the ends of both parts")
        assert time.monotonic() - struck_s < PATIENCE_S, "neither waits for the timeout of a collective"
        assert links.counted("chitu_requests_failed") == 0, "no request is poison"
    finally:
        links.net.heal()
    links.wait_back(before, {"D0", "D1"})
    links.during(300, 40, lambda: None)


@pytest.mark.by_hand
def test_a_lossy_link_changes_nothing(links: Links) -> None:
    before = links.cluster.up()
    try:
        for a, b in (("r", "a"), ("r", "b"), ("a", "b")):
            links.net.set(a, b, loss=0.03)
        for seed in range(400, 430, 10):
            links.during(seed, 100, lambda: None)
    finally:
        links.net.heal()
    assert links.cluster.up() == before


# ------------------------------------------------------------------------------------------------ ends, and late ranks


def test_a_rank_of_another_start_is_refused_and_the_group_serves_on(links: Links) -> None:
    before, cluster = links.cluster.up(), links.cluster
    words = ["-m", ENTRIES.scheduler, "--config", str(cluster.file), "--role", "decode", "--rank", "0"]
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "CHITU_CLUSTER_KEY": KEY}
    done = subprocess.run(
        links.net.argv("b", [sys.executable, *words]), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "its group has begun without this process" in done.stderr, done.stderr
    links.during(500, 40, lambda: None)
    assert cluster.up() == before


def test_a_node_that_stops_and_starts_finds_the_other_hosts_part_again(links: Links) -> None:
    before, cluster = links.cluster.up(), links.cluster
    assert cluster.nodes["a"].signal_and_wait(signal.SIGTERM) == 0
    wait_until(lambda: {*cluster.up()} == {"P0", "P1", "D2"}, 20, cluster.said)
    cluster.start("a")
    links.wait_back(before, {"D0", "D1"})
    assert cluster.nodes["b"].process.poll() is None, "its launcher has stayed"
    links.during(600, 40, lambda: None)


def test_a_drained_group_stays_away_on_all_hosts(links: Links) -> None:
    cluster = links.cluster
    cluster.client.drain("D1", force=False)
    for name, host in (("D0", "a"), ("D1", "b")):
        cluster.nodes[host].wait_line(f"{name} has left: it was drained, and is not started again")
    assert {*cluster.up()} == {"P0", "P1", "D2"}


def test_the_doctor_finds_a_taken_rendezvous_port_before_anything_starts() -> None:
    with Network(["a", "b"]) as net:
        with net.inside("a"):
            taken = socket.create_server((net.address("a"), RENDEZVOUS_PORT))
        words = [f"model.path={TINY_MODEL_DIR}", f"{CONFIG}.host={net.address('a')}"]
        words += [f"{CONFIG}.{role}_schedulers=[]" for role in ("prefill", "decode")]
        words += [f"{CONFIG}.unified_schedulers=[{group_on(net, ['a', 'b'], 2, ', devices: [cpu, cpu]')}]"]
        doctor = [sys.executable, "-m", "chitu.cli", "doctor", "pd_disagg_1p1d_multi_node", *words, "--node-index"]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        first, second = (net.popen(name, [*doctor, str(index)], **options) for index, name in enumerate("ab"))
        report, _ = first.communicate(timeout=120)
        second.communicate(timeout=120)
        assert (first.returncode, second.returncode) == (1, 1), report
        key = f"{CONFIG}.unified_schedulers.0.rendezvous_port"
        assert f"{key}: cannot listen on 0.0.0.0:{RENDEZVOUS_PORT}: Address already in use" in report
        assert "CPUs on each of 2 hosts" in report and "the same on 2 nodes" in report
        taken.close()
