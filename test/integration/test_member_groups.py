"""Groups of real processes: tokens of data ranks with tensor parallelism on the other side, every member killed in each
phase of its requests, and drains, changes of role and of weights of whole groups."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from completions import complete_all
from engine_checkpoints import Engine, generate
from nursery import FORKED, forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.tools.make_model import make_model
from chitu.types import Role

pytestmark = pytest.mark.timeout(300)
ROUTER = "dp_config.router"
PD = f"{ROUTER}.pd_disaggregation"
TOPOLOGY_CHECK = Path(__file__).parents[1] / "verify_xpyd_topology.py"
PROMPT_LENGTHS = (1, 20, 65, 150)
OUTPUT_TOKENS = 10
GREEDY: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
DP, TP = "{dp_size: 2, devices: [cpu, cpu]}", "{tp_size: 2, devices: [cpu, cpu]}"
ONE = "{devices: [cpu]}"


def started(model: Path, prefill: Sequence[str], decode: Sequence[str], **options: Any) -> LocalCluster:
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=300", "scheduler.threads=1"]
    settings += [f"{ROUTER}.prefill_schedulers=[{', '.join(prefill)}]"]
    settings += [f"{ROUTER}.decode_schedulers=[{', '.join(decode)}]", f"{PD}.verify_kv=all"]
    settings += [f"{ROUTER}.policy=round_robin", *options.pop("settings", ())]
    return LocalCluster(load_topology("pd_disagg_1p1d_local", settings), **{"entries": FORKED, **options})


def client_of(cluster: LocalCluster) -> RouterClient:
    secrets = derive(cluster_key_of(cluster.topology))
    assert secrets is not None
    return RouterClient(cluster.url, secrets.token)


def up(cluster: LocalCluster) -> dict[str, str]:
    """Return the instances that are up, with their incarnations."""
    cluster.poll()
    return {i.name: i.incarnation for i in client_of(cluster).cluster().instances if i.status == "up"}


def prompts_of(lengths: Sequence[int], seed: int, below: int = 480) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, below) for _ in range(length)] for length in lengths]


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the tokens of one engine."""
    return generate(Engine(TINY_MODEL_DIR, max_model_len=512), prompts_of(PROMPT_LENGTHS, 7), OUTPUT_TOKENS)


@pytest.mark.parametrize(("prefill", "decode"), [(TP, DP), (DP, TP)], ids=["tp-to-dp", "dp-to-tp"])
def test_members_give_the_tokens_of_one_engine_and_each_takes_part(
    prefill: str, decode: str, expected: list[list[int]]
) -> None:
    with started(TINY_MODEL_DIR, [prefill], [decode]) as cluster:
        cluster.wait_ready(120)
        prompts = prompts_of(PROMPT_LENGTHS, 7) * 2
        answers = complete_all(cluster.url, prompts, [GREEDY] * len(prompts))
        assert [answer.token_ids for answer in answers] == expected * 2
        argv = [
            sys.executable,
            str(TOPOLOGY_CHECK),
            "--router",
            cluster.url,
            "--model",
            "m",
            "--max_tokens",
            "8",
            "--json",
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.stdout, done.stderr
        verdict = json.loads(done.stdout)
        assert (done.returncode, verdict["reasons"]) == (0, [])
        assert len(verdict["instances"]) == 3 and len(verdict["pairs"]) == 2
        groups = {instance.name: instance.group for instance in client_of(cluster).cluster().instances}
        members = ("D0", "D1") if decode is DP else ("P0", "P1")
        assert {name for name, group in groups.items() if group == members} == {*members}
        assert set(cluster.stop().values()) == {0}


# -------------------------------------------------------------------------------------------------- kills in each phase

VOCAB_SIZE = 1280
STEP_S = 0.01
ENDS_TOO = "another rank of this instance or group"
"""What a member logs that ends because of another one."""
GROUPS = {"P0": ("P0", "P1"), "P2": ("P2", "P3"), "D0": ("D0", "D1"), "D2": ("D2", "D3")}
IN_CI = [
    ("prefill", "P1"),
    ("prefill", "D0"),
    ("transfer", "P2"),
    ("transfer", "D3"),
    ("decode", "P3"),
    ("decode", "D0"),
]
"""A blow to each side in each phase, in each of which a first member is hit, and another one."""
BLOWS = [
    *(("prefill", victim) for victim in ("P0", "P1", "D0", "D1")),
    *(("transfer", victim) for victim in ("P2", "P3", "D2", "D3")),
    *(("decode", victim) for victim in ("P0", "P3", "D0", "D3")),
]
BLOW_CELLS = [blow if blow in IN_CI else pytest.param(*blow, marks=pytest.mark.by_hand) for blow in BLOWS]
DEADLINES = (
    "{heartbeat_interval_s: 0.2, lease_s: 3.5, transfer_s: 5, bootstrap_s: 5, queue_s: 5, retry_interval_s: 0.2}"
)


class Doubles:
    """Two groups of P and two of D, with checksum engines: tokens depend on every byte of KV."""

    def __init__(self, folder: Path) -> None:
        self.holds = folder / "holds"
        self.holds.mkdir()
        model = make_checksum_model(folder / "model", EngineConfig(STEP_S, 0.0002, str(self.holds)))
        settings = [f"{PD}.deadlines={DEADLINES}", f"{PD}.transport=shm", "scheduler.chunk_size=64"]
        settings += ["scheduler.max_running_requests=16", f"{ROUTER}.breaker={{open_s: 1, max_open_s: 1}}"]
        options = {"settings": settings, "entries": forked(ENTRIES), "restart": True}
        self.processes = started(model, [DP, DP], [DP, DP], **options)

    def snapshot(self) -> ClusterSnapshot:
        return client_of(self.processes).cluster()

    def begin(
        self, pool: ThreadPoolExecutor, seed: int, max_tokens: int, count: int = 8
    ) -> dict[str, Future[tuple[list[int], list[int]]]]:
        """Send requests at once, two to each member of P. Return by id what comes out and what should."""

        def ask(number: int, prompt: list[int]) -> tuple[list[int], list[int]]:
            body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            headers = {"X-Request-Id": f"{seed}-{number}"}
            more = {"return_token_ids": True, "cache_salt": f"{seed}"}
            reply = httpx.post(
                f"{self.processes.url}/v1/completions", json=body | more, headers=headers, trust_env=False, timeout=60
            )
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["token_ids"], expected_tokens(prompt, max_tokens, VOCAB_SIZE)

        prompts = prompts_of([150] * count, seed, VOCAB_SIZE)
        return {f"{seed}-{number}": pool.submit(ask, number, prompt) for number, prompt in enumerate(prompts)}

    def counted(self, name: str) -> float:
        """Return the sum of a metric of the router."""
        text = httpx.get(f"{self.processes.url}/metrics", trust_env=False, timeout=60.0).text
        return sum(float(number) for number in re.findall(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doubles]:
    doubles = Doubles(tmp_path_factory.mktemp("doubles"))
    with doubles.processes as processes:
        processes.wait_ready(120)
        yield doubles


def in_phase(doubles: Doubles, phase: str, ids: set[str]) -> Callable[[], bool]:
    """Return what tells whether these requests are all in a phase, on the instances that they were sent to first."""

    def are_there() -> bool:
        running = [r for r in doubles.snapshot().requests if r.request_id in ids and r.ended_at_s is None]
        if phase == "decode":
            return len(running) == len(ids) and all(r.state == "decode" and r.output_tokens > 2 for r in running)
        held = {i.name: i.load for i in doubles.snapshot().instances if i.role == "prefill" and i.load is not None}
        return len(running) == len(ids) and sum(load.running + load.transferring for load in held.values()) >= 4

    return are_there


@pytest.mark.parametrize(("phase", "victim"), BLOW_CELLS)
def test_a_killed_member_ends_its_group_and_all_its_requests_go_on_at_another(
    doubles: Doubles, phase: str, victim: str
) -> None:
    before = up(doubles.processes)
    deaths = doubles.counted("chitu_instance_deaths")
    dead = next(group for group in GROUPS.values() if victim in group)
    num_ended = doubles.processes.logs("-".join(dead)).count(ENDS_TOO)
    if phase != "decode":
        (doubles.holds / phase).touch()
    with ThreadPoolExecutor(8) as pool:
        asked = doubles.begin(pool, BLOWS.index((phase, victim)), 80 if phase == "decode" else 20)
        try:
            wait_until(in_phase(doubles, phase, {*asked}), 20, lambda: str(doubles.snapshot().requests))
            doubles.processes.kill(victim)
            wait_until(lambda: not {*dead} & {*up(doubles.processes)}, 20, lambda: f"{dead} are gone")
        finally:
            (doubles.holds / phase).unlink(missing_ok=True)
        answers = {name: future.result() for name, future in asked.items()}
    assert all(found == right for found, right in answers.values()), answers
    records = [record for record in doubles.snapshot().requests if record.request_id in asked]
    hit = {record.request_id for record in records if record.state == "retried"}
    last = {record.request_id: (record.prefill, record.decode) for record in records if record.state == "finished"}
    assert hit or (phase, victim[0]) == ("decode", "P"), "somebody was hit"
    assert not any({*dead} & {*last[name]} for name in hit), "a retry leaves the group"
    assert doubles.counted("chitu_requests_failed") == 0, "no request is poison"
    wait_until(lambda: len(up(doubles.processes)) == 8, 60, lambda: f"all serve: {up(doubles.processes)}")
    after = up(doubles.processes)
    assert {name for name in before if before[name] != after[name]} == {*dead}, "the whole group was started again"
    assert doubles.counted("chitu_instance_deaths") == deaths + 1, "one death"
    assert doubles.processes.logs("-".join(dead)).count(ENDS_TOO) == num_ended + 1, "the other member saw it"


def test_a_signal_to_one_member_drains_its_group_which_is_started_again(doubles: Doubles) -> None:
    before = up(doubles.processes)

    def running() -> list[str]:
        return [r.decode for r in doubles.snapshot().requests if r.request_id == "200-0" and r.output_tokens > 2]

    with ThreadPoolExecutor(1) as pool:
        (answer,) = doubles.begin(pool, 200, 300, 1).values()
        wait_until(running, 20, lambda: str(doubles.snapshot().requests))
        (busy,) = running()
        group = next(group for group in GROUPS.values() if busy in group)
        (idle,) = {*group} - {busy}
        doubles.processes.kill(idle, signal.SIGTERM)
        found, right = answer.result()
    assert found == right
    states = [r.state for r in doubles.snapshot().requests if r.request_id == "200-0"]
    assert states == ["finished"], "the idle member waited for the other one"
    wait_until(lambda: not {*group} & {k for k, v in up(doubles.processes).items() if before[k] == v}, 20, "both left")
    wait_until(lambda: len(up(doubles.processes)) == 8, 60, lambda: f"all serve: {up(doubles.processes)}")


@pytest.mark.by_hand
def test_a_silent_member_takes_its_group_out_until_it_is_heard_again(doubles: Doubles) -> None:
    before = up(doubles.processes)
    doubles.processes.kill("D1", signal.SIGSTOP)
    try:
        wait_until(lambda: "D1" not in up(doubles.processes), 20, lambda: str(up(doubles.processes)))
        wait_until(lambda: "D0" in up(doubles.processes), 20, "D0 has joined again")
        with ThreadPoolExecutor(8) as pool:
            answers = [future.result() for future in doubles.begin(pool, 100, 20).values()]
        assert all(found == right for found, right in answers)
        decodes = {r.decode for r in doubles.snapshot().requests if r.request_id.startswith("100-")}
        assert decodes == {"D2", "D3"}, "D0 speaks, and half of its group is silent"
    finally:
        doubles.processes.kill("D1", signal.SIGCONT)
    wait_until(lambda: up(doubles.processes) == before, 20, lambda: str(up(doubles.processes)))


# --------------------------------------------------------------------------------------------------- orders to a group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "vocab_size": 500}
    return [make_model(base / f"{seed}", seed=seed, **sizes) for seed in range(2)]


@pytest.fixture(scope="module")
def mixed(folders: list[Path]) -> Iterator[LocalCluster]:
    """Yield groups beside single instances; one group has several ranks a member."""
    group = "{dp_size: 2, tp_size: 2, devices: [cpu, cpu, cpu, cpu]}"
    settings = [f"{PD}.deadlines.role_change_s=1"]
    with started(folders[0], [DP, ONE], [group, ONE], settings=settings, restart=True) as cluster:
        cluster.wait_ready(120)
        yield cluster


def right(cluster: LocalCluster, folder: Path, seed: int) -> bool:
    prompts = prompts_of((1, 20, 65, 150, 33, 70), seed)
    answers = complete_all(cluster.url, prompts, [GREEDY] * len(prompts))
    return [a.token_ids for a in answers] == generate(Engine(folder, max_model_len=512), prompts, OUTPUT_TOKENS)


@pytest.mark.by_hand
def test_a_group_becomes_p_and_d_again(mixed: LocalCluster, folders: list[Path]) -> None:
    assert {*up(mixed)} == {"P0", "P1", "P2", "D0", "D1", "D2"} and right(mixed, folders[0], 1)
    client = client_of(mixed)
    assert client.change_role("D1", Role.PREFILL, force=False).becomes == "P4"
    wait_until(lambda: {*up(mixed)} == {"P0", "P1", "P2", "P3", "P4", "D2"}, 30, lambda: str(up(mixed)))
    groups = {i.name: i.group for i in client.cluster().instances}
    assert groups["P3"] == groups["P4"] == ("P3", "P4")
    assert right(mixed, folders[0], 2)
    client.change_role("P3", Role.DECODE, force=False)
    wait_until(lambda: {*up(mixed)} == {"P0", "P1", "P2", "D0", "D1", "D2"}, 30, lambda: str(up(mixed)))
    assert right(mixed, folders[0], 3)


def test_a_group_changes_its_weights(mixed: LocalCluster, folders: list[Path]) -> None:
    secrets = derive(cluster_key_of(mixed.topology))
    assert secrets is not None
    headers = {"Authorization": f"Bearer {secrets.token}"}
    for folder in (folders[1], folders[0]):
        reply = httpx.post(
            f"{mixed.url}/admin/weights", json={"path": str(folder)}, headers=headers, trust_env=False, timeout=60
        )
        assert reply.status_code == 200 and reply.json()["missing"] == [], reply.text
        assert right(mixed, folder, 4)


def test_a_follower_that_dies_ends_all_members_which_come_back(mixed: LocalCluster, folders: list[Path]) -> None:
    before = up(mixed)
    ranks = mixed.supervisor.child("D0-D1").worker_pids()
    assert [ranks[0], ranks[2]] == [mixed.pid("D0"), mixed.pid("D1")] and len(ranks) == 4
    os.kill(ranks[3], signal.SIGKILL)
    wait_until(lambda: not {"D0", "D1"} & {*up(mixed)}, 20, lambda: str(up(mixed)))
    wait_until(lambda: len(up(mixed)) == 6, 60, lambda: str(up(mixed)))
    assert {name for name, number in up(mixed).items() if before[name] != number} == {"D0", "D1"}
    assert right(mixed, folders[0], 5)


def test_a_group_is_drained_as_a_whole_and_stays_away(mixed: LocalCluster, folders: list[Path]) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(right, mixed, folders[0], 6)
        client_of(mixed).drain("D1", force=False)
        mixed.wait_exit("D0-D1", 30)
        assert running.result()
    assert {*up(mixed)} == {"P0", "P1", "P2", "D2"} and mixed.members["D0-D1"].has_left
    assert right(mixed, folders[0], 7)
    mixed.restart("D0-D1")
    wait_until(lambda: len(up(mixed)) == 6, 60, lambda: str(up(mixed)))
