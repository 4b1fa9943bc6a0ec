"""1P1D over RDMA as an operator runs it: `chitu doctor` on both machines, `chitu node` on each (so under torchrun), a
cluster key, checksums of all pages, `chitu verify`; then a loss of RDMA that messages do not share.

    .venv/bin/python -m pytest test/rdma/test_rdma_cluster.py --by-hand -s

It needs 8 GB and the machine alone: an emulated processor is about 20 times slower.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from pairs import ROOT
from support.router_process import wait_until
from virtual_machines import Command, Machine, VirtualMachines

from chitu.assets import TINY_MODEL_DIR

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(3600), pytest.mark.slow]

TOPOLOGY = "pd_disagg_1p1d_multi_node"
HOSTS = "10.77.0.1,10.77.0.2"
URL = "http://10.77.0.1:21003"
KEY, API_KEY = "of-two-virtual-machines-0123456789", "sk-of-a-client"
PD = "dp_config.router.pd_disaggregation"
SETTINGS = (
    *(f"{PD}.transport=mooncake", f"{PD}.mooncake_protocol=rdma", f"{PD}.verify_kv=all"),
    *("model.served_name=m", "cache.num_pages=512", f"model.path={TINY_MODEL_DIR}"),
)
PROMPTS = [f"Count on from {start}: " + ", ".join(str(start + k) for k in range(24)) + "," for start in range(1, 13)]
READY_S = 1200.0
LOSS_S = 15.0
HEAL_S = 60.0
CLUSTER_MEMORY = "4G"
CLI = (sys.executable, "-m", "chitu.cli")


@dataclass
class Cluster:
    router: Machine
    prefill: Machine
    nodes: list[Command]
    client: Command

    def ask(self, **words: object) -> dict[str, object]:
        self.client.say(json.dumps(words))
        return dict(json.loads(self.client.line(150.0)))

    def complete(self, prompt: str, max_tokens: int = 8) -> dict[str, object]:
        return self.ask(model="m", prompt=prompt, max_tokens=max_tokens)

    def quarantined(self) -> int:
        """Return the number of pages in quarantine on all instances."""
        text = str(self.ask(path="/metrics")["text"])
        return sum(int(float(n)) for n in re.findall(r'chitu_instance_pages\{.*state="quarantined".*\} (\S+)', text))


def environment(machine: Machine) -> dict[str, str]:
    """Return the environment of chitu in a machine. It has no C compiler on its PATH: compiling the kernels takes an
    emulated processor longer than the limit."""
    links = "mkdir -p /run/path && ln -sf /usr/bin/* /usr/sbin/* /run/path && rm -f /run/path/cc /run/path/gcc"
    machine.run("sh", "-c", links)
    return {
        **{"PATH": "/run/path", "CHITU_CLUSTER_KEY": KEY, "CHITU_API_KEYS": API_KEY, "OMP_NUM_THREADS": "2"},
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, is_possible: None) -> Iterator[Cluster]:
    with VirtualMachines(tmp_path_factory.mktemp("machines"), CLUSTER_MEMORY) as machines:
        words = [TOPOLOGY, "--hosts", HOSTS]
        env = environment(machines[0])
        environment(machines[1])

        def on_both(command: str, *more: str) -> list[Command]:
            return [
                machine.start(*CLI, command, *words, "--node-index", str(k), *more, *SETTINGS, cwd=str(ROOT), env=env)
                for k, machine in enumerate(machines)
            ]

        started_s = time.monotonic()
        report = ""
        for doctor in on_both("doctor"):  # the first prints one report for both
            report += doctor.wait(READY_S)
            assert doctor.status == 0, doctor.tail()
        print(report)
        assert report.count("rxe0 ACTIVE") == 2
        print(f"doctor: {time.monotonic() - started_s:.0f} s")
        started_s = time.monotonic()
        nodes = on_both("node", "--log-dir", "/run/logs", "--ready-timeout", str(READY_S))
        try:
            wait_until(
                lambda: "Ctrl-C ends it" in nodes[0].errors or nodes[0].status is not None, READY_S, nodes[0].tail
            )
            print(nodes[0].tail())
            assert nodes[0].status is None
            print(f"ready: {time.monotonic() - started_s:.0f} s")
            client = machines[0].start(sys.executable, "-I", f"{ROOT}/test/rdma/rdma_client.py", URL, API_KEY)
            yield Cluster(machines[0], machines[1], nodes, client)
        finally:
            for machine, node in zip(machines, nodes, strict=True):
                print(machine.run("sh", "-c", "tail -n 40 /run/logs/*.log || true"), node.tail())


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[str]:
    answers = [cluster.complete(prompt) for prompt in PROMPTS]
    assert [answer["status"] for answer in answers] == [200] * len(PROMPTS), answers
    print("seconds:", *(f"{answer['took_s']:.1f}" for answer in answers))
    return [str(answer["text"]) for answer in answers]


def test_requests_are_served_over_rdma(cluster: Cluster, texts: list[str]) -> None:
    """The counters of the path say so, and the packets of soft-RoCE."""
    assert any(text.strip() for text in texts)
    metrics = str(cluster.ask(path="/metrics")["text"])
    written = re.findall(r'chitu_path_bytes_total\{.*transport="mooncake_rdma".*\} (\S+)', metrics)
    assert sum(map(float, written)) > 0, metrics[-3000:]
    sent = int(cluster.prefill.run("cat", "/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"))
    assert sent > len(PROMPTS), "pages went another way"
    assert cluster.quarantined() == 0


def test_a_loss_of_rdma_ends_and_requests_are_served_again(cluster: Cluster, texts: list[str]) -> None:
    """Messages live meanwhile. Pages come back, and texts are those of before."""
    seen, began_s = [], time.monotonic()
    cluster.prefill.lose(100, roce_only=True)
    while time.monotonic() < began_s + LOSS_S:
        seen.append(cluster.complete(PROMPTS[0] + f" {len(seen)},")["status"])
        time.sleep(0.5)
    cluster.prefill.heal()
    healed_s = time.monotonic()
    while (answer := cluster.complete(PROMPTS[1]))["status"] != 200:
        seen.append(answer["status"])
        assert time.monotonic() < healed_s + HEAL_S, (answer, seen)
        time.sleep(0.5)
    served_s = time.monotonic() - healed_s
    while cluster.quarantined():
        assert time.monotonic() < healed_s + HEAL_S, cluster.ask(path="/health")
        time.sleep(0.5)
    print(f"served again after {served_s:.1f} s, no page quarantined after {time.monotonic() - healed_s:.1f} s; {seen}")
    assert answer["text"] == texts[1]
    assert 503 in seen or 502 in seen or 500 in seen, "the loss was not felt"
    assert [cluster.complete(prompt)["text"] for prompt in PROMPTS] == texts


def test_chitu_verify_finds_no_difference(cluster: Cluster) -> None:
    """Last, since its reference is a second engine on the router's machine."""
    env = {**environment(cluster.router), "CHITU_API_KEY": API_KEY}
    argv = (*CLI, "verify", URL, "--max-tokens", "8", "--no-transformers", "--timeout", "600")
    print(cluster.router.run(*argv, timeout_s=READY_S, cwd=str(ROOT), env=env))
