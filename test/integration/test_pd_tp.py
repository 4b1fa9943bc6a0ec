"""PD between instances of 1, 2 and 4 tensor-parallel ranks: tokens, bytes, and followers that die or stop.

One cluster with P0, P1, P2 and D0, D1, D2 of 1, 2 and 4 ranks has all nine pairs of sizes; nine requests in a row reach
each pair once (round robin). The model has 4 heads and 2 KV heads, so two ranks split the KV heads and four ranks hold
each of them twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from completions import instance_loads, is_whole
from engine_checkpoints import Engine, generate
from mooncake_store import mooncake_store
from nursery import FORKED, run
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.kv_cache.aux_row import aux_row_bytes
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.protocol.trace import TraceRestored, TraceSend, TraceSent, TraceWrite
from chitu.tools.make_model import make_model
from chitu.tools.trace import is_whole as is_whole_trace

SIZES = (1, 2, 4)
LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, VOCAB = 2, 4, 2, 16, 16, 500
LENGTHS = (1, 48, 130, 1100)
"""Prompt lengths. The last one's admission does not fit the first 4 KiB of a step's broadcast."""
OUTPUT_TOKENS = 6
GREEDY: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"max_tokens": OUTPUT_TOKENS, "temperature": 1.0, "top_p": 0.9, "seed": 11, "ignore_eos": True}
PD = "dp_config.router.pd_disaggregation"
TYPED = {"prefill_lost", "decode_lost", "transfer_failed", "transfer_timeout", "poison_request"}
"""Error codes that a request on a lost instance may end with; the last one if it was on both lost instances."""
BLOWS = {
    "shm": [("P1", signal.SIGKILL), ("D1", signal.SIGSTOP)],
    "mooncake": [("D2", signal.SIGKILL), ("P2", signal.SIGSTOP)],  # to a D to which the library has connections
}
STEP_S = 20
PAIRS = {(f"P{p}", f"D{d}") for p in range(3) for d in range(3)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"layers": LAYERS, "hidden_size": 64, "heads": HEADS, "kv_heads": KV_HEADS, "vocab_size": VOCAB}
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3", **sizes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(10, VOCAB - 20) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of one undivided engine."""
    return generate(Engine(model, max_model_len=2048), prompts, OUTPUT_TOKENS)


@dataclass(frozen=True)
class Tier:
    """Place in which the pages of a cluster with this transport outlive the pool."""

    transport: str
    name: str
    setting: str
    num_pages: Callable[[], int]


@pytest.fixture(scope="module", params=[pytest.param("shm", marks=pytest.mark.by_hand), "mooncake"])
def tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    folder = tmp_path_factory.mktemp("tier")
    if request.param == "mooncake":
        with mooncake_store(folder) as store:
            yield Tier("mooncake", "store", f"cache.store.master={store.address}", store.num_keys)
        return
    yield Tier("shm", "disk", f"cache.disk.path={folder}", lambda: len({path.name for path in folder.glob("*/*.kv")}))


@pytest.fixture(scope="module")
def cluster(model: Path, tier: Tier) -> Iterator[LocalCluster]:
    settings = [f"model.path={model}", "model.served_name=m", "cache.num_pages=400", f"{PD}.transport={tier.transport}"]
    settings.append(f"scheduler.overlap={'on' if tier.transport == 'shm' else 'auto'}")
    settings += ["cache.host_bytes=8000000", "cache.load_timeout_s=60", tier.setting]
    settings.append("dp_config.router.policy=round_robin")  # a request sent nine times reaches every pair
    settings += ["scheduler.chunk_size=200", "scheduler.max_running_requests=16", "scheduler.threads=1"]
    settings.append(f"{PD}.deadlines.step_s={STEP_S}")
    settings.append(f"{PD}.deadlines.drain_s=60")  # Mooncake engines take a second each to shut down, on a free core
    for index, size in enumerate(SIZES):
        for role in ("prefill", "decode"):
            key = f"dp_config.router.{role}_schedulers.{index}"
            settings += [f"{key}.tp_size={size}", f"{key}.devices=[{','.join(['cpu'] * size)}]"]
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster
        failed = {name: cluster.logs(name)[-5000:] for name, code in cluster.stop().items() if code != 0}
        assert not failed, "\n".join(["not every rank ends by itself", *failed.values()])


@dataclass(frozen=True)
class Answer:
    request_id: str
    token_ids: list[int]
    error: str
    cached_tokens: int = 0


def ask(cluster: LocalCluster, prompts: list[list[int]], options: dict[str, Any]) -> list[Answer]:
    """Send all requests at once, without sharing cached pages; return the answers in order."""

    async def one(client: httpx.AsyncClient, number: int, prompt: list[int]) -> Answer:
        body = {"model": "m", "prompt": prompt, "return_token_ids": True, "cache_salt": str(number), **options}
        reply = await client.post("/v1/completions", json=body, headers={"X-Chitu-Trace": "1"})
        request_id = reply.headers.get("x-request-id", "")
        if reply.status_code != 200:
            return Answer(request_id, [], reply.json()["error"]["code"])
        answer = reply.json()
        cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(request_id, answer["choices"][0]["token_ids"], "", cached_tokens)

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=150.0, trust_env=False) as client:
            return await asyncio.gather(*[one(client, *numbered) for numbered in enumerate(prompts)])

    return asyncio.run(run())


def ask_until(end: threading.Event, cluster: LocalCluster, prompt: list[int]) -> list[Answer]:
    """Send 24 requests at once, again and again, so that some are in flight whenever `end` is set."""
    answers = []
    while not end.is_set():
        answers += ask(cluster, [prompt] * 24, GREEDY)
    return answers


def snapshot_of(cluster: LocalCluster) -> ClusterSnapshot:
    return msgspec.json.decode(httpx.get(f"{cluster.url}/cluster", timeout=10).content, type=ClusterSnapshot)


def right_bytes(num_tokens: int, decode_size: int) -> int:
    """Return the expected bytes. Every rank's copy of a KV head counts; the logits row goes to the main rank alone."""
    pages = -(-num_tokens // PAGE_SIZE)
    heads = max(KV_HEADS, decode_size)
    return pages * LAYERS * 2 * heads * PAGE_SIZE * HEAD_DIM * 4 + aux_row_bytes(VOCAB)


def check_trace(client: RouterClient, request_id: str, kv_bytes: int) -> None:
    """Check that hashes of both sides are equal, however their ranks share the heads, and that bytes match formula and
    writes."""
    wait_until(lambda: is_whole_trace(client.trace(request_id).records), 15.0, lambda: client.trace(request_id))
    answer = client.trace(request_id)
    assert answer.timeline.pages and all(check.is_same for check in answer.timeline.pages), answer.timeline
    of = [each for each in answer.records if isinstance(each, TraceSend | TraceSent | TraceRestored)]
    assert [each.total_bytes for each in of] == [kv_bytes] * 3, of
    assert sum(each.total_bytes for each in answer.records if isinstance(each, TraceWrite)) == kv_bytes


def ranks_of(cluster: LocalCluster, name: str) -> list[psutil.Process]:
    """Return the processes of an instance, main rank first."""
    torchrun = psutil.Process(cluster.pid(name)).parent()
    assert torchrun is not None
    return sorted(torchrun.children(), key=lambda process: process.pid)


def wait_for_pages(tier: Tier, wanted: int) -> None:
    wait_until(lambda: tier.num_pages() >= wanted, 60.0, lambda: f"{tier.num_pages()} of {wanted} pages are there")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_outside_the_pool_are_those_of_instances_of_every_size(
    cluster: LocalCluster, tier: Tier, model: Path
) -> None:
    """Runs first, with an empty tier. Nine conversations take each turn on another pair: P finds its pages, and those
    of the answers, wherever they were computed."""
    rng = random.Random(8)
    conversations = [[rng.randrange(10, VOCAB - 20) for _ in range(45)] for _ in PAIRS]
    known, options = 0, GREEDY | {"cache_salt": "shared"}
    for turn in range(3):
        engines = [Engine(model, max_model_len=2048) for _ in range(2)]
        parts = (conversations[:5], conversations[5:])
        tokens = [each for pair in zip(engines, parts, strict=True) for each in generate(*pair, OUTPUT_TOKENS)]
        for index, prompt in enumerate(conversations):
            (answer,) = ask(cluster, [prompt], options)
            cached = known // PAGE_SIZE * PAGE_SIZE
            assert answer.token_ids == tokens[index], (turn, index, answer)
            # 0 if P found that it computes faster.
            assert answer.cached_tokens in (0, cached), (turn, index, cached, answer)
        known = len(conversations[0]) + OUTPUT_TOKENS - 1  # the newest token has no K and V yet
        wait_for_pages(tier, len(PAIRS) * (known // PAGE_SIZE))
        ask(cluster, [[turn] * 9], options)  # so the next turns meet other pairs
        for prompt, answer_tokens in zip(conversations, tokens, strict=True):
            prompt += [*answer_tokens, *(rng.randrange(10, VOCAB - 20) for _ in range(9))]

    def have_read() -> bool:
        loads = instance_loads(cluster.url)
        return all(loads[f"P{index}"][f"{tier.name}_tokens"] for index in range(3))

    wait_until(have_read, 15.0, lambda: instance_loads(cluster.url))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_of_sizes_gives_the_tokens_of_one_engine_and_moves_the_right_bytes(
    cluster: LocalCluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        answers = ask(cluster, [prompt] * len(PAIRS), GREEDY)
        assert [answer.token_ids for answer in answers] == [tokens] * len(PAIRS), answers
        requests = snapshot_of(cluster).requests
        records = [r for r in requests if r.request_id in {answer.request_id for answer in answers}]
        assert {(record.prefill, record.decode) for record in records} == PAIRS
        for record in records:
            decode_size = SIZES[int(str(record.decode)[1:])]
            assert record.kv_bytes == right_bytes(len(prompt), decode_size), record
            check_trace(RouterClient(cluster.url), record.request_id, record.kv_bytes)
    seeded = ask(cluster, [prompts[2]] * len(PAIRS), SEEDED)
    assert len({tuple(answer.token_ids) for answer in seeded}) == 1, "D1 and D2 sample what D0 samples"
    names = [f"{role}{index}" for role in "PD" for index in range(3)]
    wait_until(
        lambda: all(is_whole(instance_loads(cluster.url)[name]) for name in names),
        15.0,
        lambda: instance_loads(cluster.url),
    )


def test_a_follower_listens_to_nobody_outside_its_host(cluster: LocalCluster) -> None:
    if "transport: mooncake" in (cluster.log_dir / "topology.yaml").read_text():
        pytest.skip("Mooncake listens on all interfaces, see docs/security.md")
    for name, size in (("P1", 2), ("D2", 4)):
        ranks = ranks_of(cluster, name)
        assert len(ranks) == size
        for rank in ranks:
            listening = {c.laddr.ip for c in rank.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
            assert listening <= {"127.0.0.1"}, f"{name} {rank.pid}"


def test_one_process_alone_is_no_instance_of_two_ranks(model: Path) -> None:
    key = "dp_config.router.decode_schedulers.0"
    argv = [sys.executable, "-m", "chitu.serve.scheduler", "--role", "decode", "--rank", "0"]
    result = run([*argv, f"model.path={model}", f"{key}.tp_size=2", f"{key}.devices=[cpu,cpu]"], os.environ, 60)
    assert result.returncode == 2
    assert "torchrun started 1 ranks: give --nproc-per-node=2" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_followers_that_die_or_stop_end_their_instances_which_come_back_and_read_what_they_kept(
    cluster: LocalCluster, tier: Tier, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    num_pages, kept = tier.num_pages(), GREEDY | {"cache_salt": "kept"}
    assert ask(cluster, [prompts[1]], kept)[0].token_ids == expected[1]
    wait_for_pages(tier, num_pages + len(prompts[1]) // PAGE_SIZE)
    ranks = {name: ranks_of(cluster, name) for name, _ in BLOWS[tier.transport]}
    assert all(ranks[name][0].pid == cluster.pid(name) for name in ranks)
    with ThreadPoolExecutor(1) as pool:
        struck = threading.Event()
        load = pool.submit(ask_until, struck, cluster, prompts[-1])
        try:
            wait_until(lambda: snapshot_of(cluster).in_flight > 4, 30.0, lambda: instance_loads(cluster.url))
            for name, blow in BLOWS[tier.transport]:
                os.kill(ranks[name][-1].pid, blow)
        finally:
            struck.set()
        for name, blow in BLOWS[tier.transport]:
            ranks[name][0].wait(15.0 if blow == signal.SIGKILL else STEP_S + 15.0)
            cluster.wait_exit(name, timeout_s=15.0)  # torchrun would give a stopped follower 30 s to end by itself
        answers = load.result(timeout=120)
    assert not any(rank.is_running() for name in ranks for rank in ranks[name]), "nothing of the instances is left"
    for name in (name for name, blow in BLOWS[tier.transport] if blow == signal.SIGKILL):
        log = cluster.logs(name)
        assert "another rank of this instance" in log and "a step raised" not in log, log[-8000:]
    for answer in answers:
        assert answer.token_ids == expected[-1] or answer.error in TYPED, answer
    for name in ranks:
        cluster.restart(name)
    cluster.wait_ready(300)
    cached = (len(prompts[1]) - 1) // PAGE_SIZE * PAGE_SIZE
    again = [ask(cluster, [prompts[1]], kept)[0] for _ in PAIRS]
    assert [answer.token_ids for answer in again] == [expected[1]] * len(PAIRS), again
    assert {answer.cached_tokens for answer in again} <= {0, cached}, again
    (prefill,) = (name for name in ranks if name.startswith("P"))

    def have_read() -> bool:
        return bool(instance_loads(cluster.url)[prefill][f"{tier.name}_tokens"] == cached)

    wait_until(have_read, 15.0, lambda: instance_loads(cluster.url))
