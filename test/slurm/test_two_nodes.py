"""The launch scripts on a real Slurm of two nodes: start, serve, a cut link, a death, scancel. Nothing is left behind.

If Slurm cannot start, the tests are skipped with what is missing; with CI=true in the environment they fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, environment, missing
from support.router_process import wait_until

from chitu.launch.slurm import expand_nodelist
from chitu.protocol.kept_request import unpack
from chitu.tools.make_model import make_model

ROOT = Path(__file__).parents[2]
NODE0, NODE1 = NODES
ROUTER_URL = f"http://{NODE0}:21003"
SLURMD_PORT = 6818
CUT_S = 1.0
"""Duration of the cut, below every deadline: an instance counts as dead after 3 s of silence."""
READY_S = 400.0
"""Timeout of a start; a machine with free cores takes 20 s."""
SETTINGS = ["model.served_name=m", "cache.num_pages=256"]
WIDE = (
    "dp_config.router.decode_schedulers=[{hosts: [node-a.example, node-b.example], dp_size: 2, rendezvous_port: 29400}]"
)
"""D over both nodes."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if absent := missing():
        text = f"no Slurm here, missing: {', '.join(absent)} (script/setup.sh --dev installs the packages where it can)"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("models") / "llama", family="llama"))


class Launched:
    """A launch script that runs on the login machine, as a user would start it."""

    def __init__(self, cluster: SlurmCluster, command: list[str], folder: Path) -> None:
        self.folder = folder
        self._log = folder / "output.txt"
        self._cluster = cluster
        self.process = cluster.start(command, self._log)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        self.wait_output("Ctrl-C ends it")

    def wait_output(self, text: str) -> None:
        def seen() -> bool:
            return text in self.output() or (self.process.poll() is not None and not self._cluster.jobs())

        wait_until(seen, READY_S, self.output)
        assert text in self.output(), self.output()

    def wait_nothing_left(self) -> None:
        """Wait until no job, no process and no port is left on either node."""
        cluster = self._cluster
        wait_until(lambda: not cluster.jobs(), 40, lambda: f"the job ends: {self.output()}")
        wait_until(
            lambda: not any(map(cluster.own_processes, NODES)), 5, lambda: str([*map(cluster.own_processes, NODES)])
        )
        assert [cluster.machines.listening(node) for node in NODES] == [[SLURMD_PORT], [SLURMD_PORT]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the requests that outlive their job."""
    return tmp_path_factory.mktemp("kept") / "requests"


@pytest.fixture(scope="module")
def wide(cluster: SlurmCluster, model: str, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Return a batch job that is ready: 1P1D, D over both nodes."""
    folder = tmp_path_factory.mktemp("wide")
    batch = ["sbatch", f"--output={folder / 'output.txt'}", "--open-mode=append"]
    script = ["script/srun_pd_disagg_1p1d_two_nodes.sh", "--model", model]
    options = ["--log-dir", str(folder), "--cpus-per-gpu", "1", *SETTINGS, WIDE]
    options.append(f"dp_config.router.kept_requests.dir={kept}")
    launched = Launched(cluster, [*batch, *script, *options], folder)
    launched.wait_ready()
    return launched


@pytest.fixture(scope="module")
def served(cluster: SlurmCluster, model: str, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Return the next job, which is ready: 2P3D."""
    folder = tmp_path_factory.mktemp("served")
    script = ["bash", "script/srun_pd_disagg_2p3d_two_nodes.sh", "--model", model, "--partition", "main"]
    options = ["--log-dir", str(folder), "--cpus-per-gpu", "1", *SETTINGS]
    options.append(f"dp_config.router.kept_requests.dir={kept}")
    launched = Launched(cluster, ["srun", "-N", "2", *script, *options], folder)
    launched.wait_ready()
    return launched


@pytest.mark.parametrize("text", ["pd-node[0-1]", "n[08-11,3],login", "a[0-1]b[2,4]", "x[098-101]"])
def test_a_node_list_expands_as_scontrol_does_it(cluster: SlurmCluster, text: str) -> None:
    assert expand_nodelist(text) == cluster.output(["scontrol", "show", "hostnames", text]).split()


def test_a_wrong_request_is_refused_in_words_before_anything_starts(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = ["bash", "script/srun_pd_disagg_1p1d_two_nodes.sh", "--model", "/nowhere"]
    launched = Launched(cluster, ["srun", "-N", "2", *script], tmp_path)
    assert launched.process.wait(60) == 2
    assert "model.path is '/nowhere', but there is no such folder" in launched.output()
    launched.wait_nothing_left()


def test_a_doctor_on_each_node_makes_one_report(cluster: SlurmCluster, model: str, tmp_path: Path) -> None:
    command = ["srun", "-N", "2", sys.executable, "-m", "chitu.cli", "doctor", "pd_disagg_1p1d_multi_node"]
    sound = Launched(cluster, [*command, "--model", model], tmp_path)
    assert sound.process.wait(120) == 0, sound.output()
    for part in (NODE0, NODE1, "2 nodes reach each other's ports", "the same on 2 nodes", "P0 on CPUs"):
        assert part in sound.output()
    # Slurm's own daemon uses this port on both nodes: P0's node finds the conflict, and the router's node prints it.
    planted = f"dp_config.router.prefill_schedulers.0.port={SLURMD_PORT}"
    ill = Launched(cluster, [*command, "--model", model, planted], tmp_path)
    assert ill.process.wait(120) == 1
    assert f"cannot listen on 0.0.0.0:{SLURMD_PORT}: Address already in use" in ill.output()
    ill.wait_nothing_left()


@pytest.mark.by_hand
def test_an_instance_over_two_nodes_serves_and_meets_again_after_a_death(
    cluster: SlurmCluster, wide: Launched, tmp_path: Path
) -> None:
    assert "node 0 (198.18.77.10): router D0" in wide.output() and "node 1 (198.18.77.11): P0 D1" in wide.output()

    def check(name: str) -> None:
        script = [sys.executable, "test/verify_xpyd_topology.py", "--router", ROUTER_URL, "--model", "m"]
        (tmp_path / name).mkdir()
        done = Launched(cluster, ["env", f"PYTHONPATH={ROOT}", *script, "--json"], tmp_path / name)
        assert done.process.wait(120) == 0, done.output()
        assert set(json.loads(done.output())["instances"]) == {"P0", "D0", "D1"}

    check("before")
    (victim,) = (
        pid
        for pid, command in cluster.own_processes(NODE1).items()
        if "--role decode" in command and "torch.distributed.run" not in command and "pt_elastic" not in command
    )
    cluster.machines.output(NODE1, ["kill", "-KILL", str(victim)])
    log = wide.folder / "router.log"
    wait_until(lambda: len(re.findall(r"D[01] joined", log.read_text())) == 4, 90, wide.output)
    check("after")


@pytest.mark.by_hand
def test_requests_outlive_their_job(
    cluster: SlurmCluster, wide: Launched, kept: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGTERM to the batch script ends the job in the middle of two streams; the next job continues both, and their
    clients read on. The next job is the one of the tests below."""
    url = f"{ROUTER_URL}/v1/"
    common = {"model": "m", "prompt": [*range(5, 60)], "max_tokens": 600, "ignore_eos": True, "stream": True}
    bodies = {"greedy": {**common, "temperature": 0}, "seeded": {**common, "temperature": 1.0, "top_k": 4}}

    def curl(log: str, *arguments: str) -> subprocess.Popen[bytes]:
        return cluster.start(["curl", "-sN", "--retry", "5", "--max-time", "120", *arguments], tmp_path / log)

    def post(log: str, name: str, **more: object) -> subprocess.Popen[bytes]:
        return curl(log, f"{url}completions", "-H", f"X-Request-Id: {name}", "-d", json.dumps({**bodies[name], **more}))

    def events(log: str) -> list[dict[str, object]]:
        lines = [line for line in (tmp_path / log).read_text().splitlines() if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]

    def text(found: list[dict[str, object]]) -> str:
        return "".join(choice["text"] for event in found for choice in event.get("choices", ()))  # type: ignore[attr-defined]

    try:
        (job,) = cluster.jobs()
        clients = [post(name, name) for name in bodies]
        wait_until(lambda: all(len(events(name)) >= 40 for name in bodies), 60, wide.output)
        cluster.output(["scancel", "--batch", "--signal=TERM", job])  # as `sbatch --signal=B:TERM@60`
        assert [client.wait(60) for client in clients] == [0, 0]
        wide.wait_nothing_left()
    finally:
        if left := cluster.jobs():
            cluster.output(["scancel", *left])
    assert "ExitCode=0:0" in cluster.output(["scontrol", "show", "job", job])
    records = {record.request_id: record for record in (unpack(path.read_bytes()) for path in kept.iterdir())}
    assert records.keys() == bodies.keys(), wide.output()
    request.getfixturevalue("served")
    for name, record in records.items():
        *before, error = events(name)
        assert 40 <= len(before) < 600 and len(record.token_ids) < 600
        assert "request_kept" in str(error) and f"GET /v1/requests/{name}" in str(error)
        number = (tmp_path / name).read_text().rpartition("id: ")[2].split()[0]
        assert curl(f"{name}.rest", "-H", f"Last-Event-ID: {number}", f"{url}requests/{name}").wait(130) == 0
        assert post(f"{name}.whole", name, seed=record.sampling.seed).wait(130) == 0
        assert text(before) + text(events(f"{name}.rest")) == text(events(f"{name}.whole"))
        assert "[DONE]" in (tmp_path / f"{name}.rest").read_text()
    assert not list(kept.iterdir())


def test_every_pair_of_2p3d_on_two_nodes_takes_part(cluster: SlurmCluster, served: Launched, tmp_path: Path) -> None:
    assert "node 0 (198.18.77.10): router D0 D1 D2" in served.output()
    assert "node 1 (198.18.77.11): P0 P1" in served.output()
    assert "node 0 devices: D0, D1, D2 on CPUs, in float32: this node has no GPU" in served.output()
    assert "a Slurm job asks for some with --gpus-per-node" in served.output()
    script = [sys.executable, "test/verify_xpyd_topology.py", "--router", ROUTER_URL, "--model", "m"]
    options = ["--concurrency", "6", "--max_tokens", "16", "--stream", "--json"]
    check = Launched(cluster, ["env", f"PYTHONPATH={ROOT}", *script, *options], tmp_path)
    assert check.process.wait(120) == 0, check.output()
    verdict = json.loads(check.output())
    assert verdict["ok"]
    assert set(verdict["instances"]) == {"P0", "P1", "D0", "D1", "D2"}
    assert min(verdict["instances"].values()) > 0
    assert len(verdict["pairs"]) == 6


def test_requests_outlast_a_link_cut_that_is_shorter_than_the_deadlines(
    cluster: SlurmCluster, served: Launched, tmp_path: Path
) -> None:
    log = tmp_path / "answers.jsonl"
    script = [sys.executable, "test/slurm/load_client.py", ROUTER_URL, "4"]
    client = cluster.start(script, log, stdin=subprocess.PIPE)

    def answers() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().split("\n")[:-1]]

    def wait_more(count: int) -> None:
        goal = len(answers()) + count
        wait_until(lambda: len(answers()) >= goal or client.poll() is not None, 90, log.read_text)

    wait_more(12)
    before = len(answers())
    cluster.machines.cut(NODE1)
    try:
        threading.Event().wait(CUT_S)  # the link is down for this long
    finally:
        cluster.machines.mend(NODE1)
    wait_more(18)
    assert client.stdin is not None
    client.stdin.close()
    assert client.wait(90) == 0, log.read_text()
    found = answers()
    assert [answer for answer in found if "error" in answer] == []
    assert max(float(str(answer["seconds"])) for answer in found[before:]) > CUT_S / 2, "the cut held requests up"
    tokens = {(answer["prompt"], str(answer["token_ids"])) for answer in found}
    assert len(tokens) == len({prompt for prompt, _ in tokens}), (
        f"one prompt, several answers: {sorted(map(str, tokens))}"
    )
    assert "is gone" not in (served.folder / "router.log").read_text()


def test_the_death_of_an_instance_ends_the_job_with_its_name(cluster: SlurmCluster, served: Launched) -> None:
    (job,) = cluster.jobs()
    prefill = [
        pid
        for pid, command in cluster.own_processes(NODE1).items()
        if "--role prefill" in command and "torch.distributed.run" not in command and "pt_elastic" not in command
    ]
    assert len(prefill) == 2, f"{cluster.own_processes(NODE1)}\n{served.output()}"
    cluster.machines.output(NODE1, ["kill", "-KILL", str(prefill[0])])
    assert served.process.wait(60) != 0
    served.wait_nothing_left()
    record = cluster.output(["scontrol", "show", "job", job])
    assert "JobState=FAILED" in record, record
    named = re.search(r"(P[01]) ended \(killed by SIGKILL\)", served.output())
    assert named is not None, served.output()
    assert f" {named[1]} I chitu.kv_transfer" in served.output(), "the last lines of its log"


def test_scancel_while_it_starts_leaves_nothing(cluster: SlurmCluster, model: str, tmp_path: Path) -> None:
    script = ["bash", "script/srun_pd_disagg_1p1d_two_nodes.sh", "--model", model, "--log-dir", str(tmp_path)]
    launched = Launched(cluster, ["srun", "-N", "2", *script, *SETTINGS], tmp_path)
    launched.wait_output("P0: starting")
    cluster.output(["scancel", *cluster.jobs()])
    launched.wait_nothing_left()


def test_by_ssh_the_end_of_the_script_is_the_end_on_all_machines(
    cluster: SlurmCluster, model: str, tmp_path: Path
) -> None:
    addresses = [cluster.machines.addresses[node] for node in NODES]
    ssh = tmp_path / "ssh"  # enters the machine; its child gets SIGHUP when it ends, as with `ssh -tt`
    doors = [
        f"{cluster.machines.addresses[node]}) door='{' '.join(cluster.machines.argv(node, []))}' ;;" for node in NODES
    ]
    command = 'exec $door setpriv --pdeathsig HUP bash -c "$2"'
    ssh.write_text("\n".join(["#!/bin/bash", "case $1 in", *doors, "esac", command, ""]))
    ssh.chmod(0o755)
    script = [
        "bash",
        "script/start_pd_separation.sh",
        "--hosts",
        ",".join(addresses),
        "--ssh",
        "--model",
        model,
        *SETTINGS,
    ]
    log = tmp_path / "output.txt"
    with log.open("wb") as output:
        launched = subprocess.Popen(
            [*script, "--log-dir", str(tmp_path)],
            env={**environment(), "PD_SSH": str(ssh)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "P0: starting" in log.read_text() and "router: ready" in log.read_text(), 120, log.read_text)
    finally:
        launched.terminate()
    assert launched.wait(60) == 0, log.read_text()
    wait_until(
        lambda: not any(map(cluster.own_processes, NODES)), 40, lambda: str([*map(cluster.own_processes, NODES)])
    )
    assert [cluster.machines.listening(node) for node in NODES] == [[SLURMD_PORT], [SLURMD_PORT]]
