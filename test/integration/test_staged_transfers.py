"""Real P and D with staged transfers over shm, Mooncake, and shm between pools of GPUs: right tokens, no leaks, and P
and D may be killed.

The instances have the checksum engine: every token depends on every byte of KV in the pages, and `expected_tokens`
gives the right ones whichever way the bytes came. There are two segments of 1 MiB, so requests wait for each other.
Pools of GPUs (`pinned`) are twins: only D's segments can be written, so `transfer: auto` stages pages and logits rows.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole, leave_early
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.fake.executor import expected_tokens
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries

PD = "dp_config.router.pd_disaggregation"
VOCAB_SIZE = 1280
OUTPUT_TOKENS = 6
SETTINGS = [
    "model.served_name=m",
    "model.max_model_len=2048",
    "cache.num_pages=1200",
    "scheduler.chunk_size=128",
    f"{PD}.staging_mb=2",
    f"{PD}.staging_segment_mb=1",
    f"{PD}.deadlines.heartbeat_interval_s=0.2",
    f"{PD}.deadlines.retry_interval_s=0.2",
]


@pytest.fixture(scope="module", params=["shm", "mooncake", pytest.param("pinned", marks=pytest.mark.emulated)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if request.param == "mooncake":
        try:
            import mooncake.engine  # noqa: F401
        except (ImportError, OSError) as error:
            pytest.skip(f"mooncake does not import here: {error}")
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.001, 0.0))
    is_pinned = request.param == "pinned"
    ways = ["transport=shm", "verify_kv=all"] if is_pinned else [f"transport={request.param}", "transfer=staged"]
    entries = Entries(scheduler="pinned_scheduler", torchrun=False) if is_pinned else ENTRIES
    settings = [f"model.path={model}", *(f"{PD}.{way}" for way in ways), *SETTINGS]
    with pytest.MonkeyPatch.context() as environment:
        if is_pinned:
            environment.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=forked(entries)) as cluster:
            cluster.wait_ready(60)
            yield cluster


def prompts_of(count: int, seed: int, longest: int = 1200) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(16, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def assert_right(cluster: LocalCluster, prompts: list[list[int]]) -> None:
    options = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    answers = complete_all(cluster.url, prompts, [options] * len(prompts))
    assert [answer.token_ids for answer in answers] == [
        expected_tokens(prompt, OUTPUT_TOKENS, VOCAB_SIZE) for prompt in prompts
    ]


def assert_whole(cluster: LocalCluster) -> None:
    """Wait until pages and rows are all free and no writes are suspended."""

    def whole() -> bool:
        loads = instance_loads(cluster.url)
        has_both = all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))
        return has_both and not loads["P0"]["suspended"]

    wait_until(whole, 15.0, lambda: instance_loads(cluster.url))


def test_every_byte_goes_through_segments_and_every_token_is_right(cluster: LocalCluster) -> None:
    assert_right(cluster, prompts_of(25, seed=1))
    assert_whole(cluster)
    assert instance_loads(cluster.url)["P0"]["bytes_moved"] > 0
    assert "all writes are staged, in 2 segments of 1048576 bytes" in cluster.logs("P0")


def test_clients_that_leave_at_random_moments_leak_neither_pages_nor_segments(cluster: LocalCluster) -> None:
    leave_early(cluster.url, prompts_of(60, seed=5), longest_s=0.3, max_tokens=100)
    assert_whole(cluster)
    assert_right(cluster, prompts_of(5, seed=2))


@pytest.mark.parametrize("name", ["D0", pytest.param("P0", marks=pytest.mark.by_hand)])
def test_after_a_kill_in_the_middle_of_transfers_the_other_side_is_whole_and_serves_the_next(
    cluster: LocalCluster, name: str
) -> None:
    """The new P gets the segments of the dead one; the new D brings its own."""
    other = "P0" if name == "D0" else "D0"
    pid = cluster.pid(other)

    async def load_and_kill() -> list[int]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0, trust_env=False) as client:

            async def ask(prompt: list[int]) -> int:
                body = {"model": "m", "prompt": prompt, "max_tokens": 30, "ignore_eos": True}
                return (await client.post("/v1/completions", json=body)).status_code

            tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts_of(20, seed=3)]
            before = instance_loads(cluster.url)["P0"]["bytes_moved"]

            def moves() -> bool:
                return instance_loads(cluster.url)["P0"]["bytes_moved"] > before

            await asyncio.to_thread(wait_until, moves, 20.0, lambda: "nothing is transferred")
            cluster.kill(name, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    statuses = asyncio.run(load_and_kill())
    assert set(statuses) <= {200, 503}, statuses
    cluster.wait_exit(name)
    cluster.restart(name)
    cluster.wait_ready()
    assert cluster.pid(other) == pid, f"{other} was restarted"
    assert_right(cluster, prompts_of(10, seed=4))
    assert_whole(cluster)
