"""1P1D over `shm` between pools of GPUs, with twins of the device: whole processes, whole protocol, `transfer: auto`.

Only D's segments can be written, so pages and logits rows are staged. A P or D that is killed leaves nothing behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions import complete_all, instance_loads, is_whole
from nursery import forked
from support.checksum_scheduler import EngineConfig, make_checksum_model
from support.executors import expected_tokens
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.plan import Entries

pytestmark = pytest.mark.emulated

PD = "dp_config.router.pd_disaggregation"
VOCAB_SIZE = 1280
TOKENS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model = make_checksum_model(tmp_path_factory.mktemp("models") / "model", EngineConfig(0.001, 0.0))
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "model.max_model_len=2048",
        "cache.num_pages=600",
        "scheduler.chunk_size=128",
        f"{PD}.transport=shm",
        f"{PD}.verify_kv=all",
        f"{PD}.staging_mb=2",
        f"{PD}.staging_segment_mb=1",
        f"{PD}.deadlines.heartbeat_interval_s=0.2",
        f"{PD}.deadlines.retry_interval_s=0.2",
    ]
    topology = load_topology("pd_disagg_1p1d_local", settings)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))
        with LocalCluster(topology, entries=forked(Entries(scheduler="pinned_scheduler", torchrun=False))) as cluster:
            cluster.wait_ready(60)
            yield cluster


def assert_right_and_whole(cluster: LocalCluster, seed: int, count: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(16, VOCAB_SIZE) for _ in range(rng.randint(1, 900))] for _ in range(count)]
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    found = [answer.token_ids for answer in complete_all(cluster.url, prompts, [options] * count)]
    assert found == [expected_tokens(prompt, TOKENS, VOCAB_SIZE) for prompt in prompts]

    def whole() -> bool:
        loads = instance_loads(cluster.url)
        return all(name in loads and is_whole(loads[name]) for name in ("P0", "D0"))

    wait_until(whole, 15.0, lambda: instance_loads(cluster.url))


def test_pages_and_logits_come_through_segments_in_host_memory(cluster: LocalCluster) -> None:
    assert_right_and_whole(cluster, seed=1, count=16)
    load = instance_loads(cluster.url)["P0"]
    assert load["bytes_moved"] > 0 and "all writes are staged" in cluster.logs("P0"), load


@pytest.mark.parametrize("name", ["D0", "P0"])
def test_a_process_that_is_killed_comes_back_to_segments_that_are_free(cluster: LocalCluster, name: str) -> None:
    cluster.kill(name)
    cluster.wait_exit(name)
    cluster.restart(name)
    cluster.wait_ready(60)
    assert_right_and_whole(cluster, seed=2, count=6)
