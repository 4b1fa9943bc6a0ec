"""A real 1P1D under pressure: a pool that is too small, clients that leave, a decode instance that is killed."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from completions import complete_all, instance_loads, is_whole, leave_early
from engine_checkpoints import Engine, generate
from nursery import FORKED
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

PD = "dp_config.router.pd_disaggregation"
PATIENCE = [f"{PD}.deadlines.queue_s=120", f"{PD}.deadlines.transfer_s=120"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3", heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def settings(model: Path) -> list[str]:
    return [f"model.path={model}", "model.served_name=m", "cache.num_pages=2000"]


@pytest.fixture(scope="module", params=[pytest.param("shm", marks=pytest.mark.by_hand), "mooncake"])
def cluster(request: pytest.FixtureRequest, settings: list[str]) -> Iterator[LocalCluster]:
    if request.param == "mooncake":
        try:
            import mooncake.engine  # noqa: F401
        except (ImportError, OSError) as error:
            pytest.skip(f"mooncake does not import here: {error}")
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings, f"{PD}.transport={request.param}"])
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()
        yield cluster


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def assert_whole(cluster: LocalCluster, names: tuple[str, ...] = ("P0", "D0"), timeout_s: float = 15.0) -> None:
    """Check that free pages and aux slots are back at their initial value on both sides."""

    def whole() -> bool:
        loads = instance_loads(cluster.url)
        return all(name in loads and is_whole(loads[name]) for name in names)

    wait_until(whole, timeout_s, lambda: instance_loads(cluster.url))


def kill_under_load(
    cluster: LocalCluster, name: str, prompts: list[list[int]], max_tokens: int
) -> list[tuple[int, str]]:
    """Kill an instance when all requests are in and some run on D; return status and body of each end."""

    async def request(client: httpx.AsyncClient, prompt: list[int]) -> tuple[int, str]:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body)
        return response.status_code, response.text

    def all_are_in(num_done: int) -> bool:
        """Return whether the router has every request and D runs some. A request after the kill finds no instance to
        serve it."""
        arrived = num_done + RouterClient(cluster.url).cluster().in_flight
        return arrived == len(prompts) and instance_loads(cluster.url).get("D0", {}).get("running", 0) >= 3

    async def load_and_kill() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=150.0, trust_env=False) as client:
            tasks = [asyncio.create_task(request(client, prompt)) for prompt in prompts]
            while not await asyncio.to_thread(all_are_in, sum(task.done() for task in tasks)):
                assert not all(task.done() for task in tasks), "all requests ended before the kill"
                await asyncio.sleep(0.05)
            cluster.kill(name, signal.SIGKILL)
            return await asyncio.gather(*tasks)

    return asyncio.run(load_and_kill())


def test_a_pool_too_small_for_the_load_still_gives_every_request_its_tokens(
    model: Path, settings: list[str], one_thread: None
) -> None:
    prompts = prompts_of(24, 300, seed=3)
    options = [{"max_tokens": 120, "temperature": 0, "ignore_eos": True}] * len(prompts)
    small = ["cache.num_pages=40", "scheduler.reserved_decode_tokens=4", *PATIENCE]
    roomy = Engine(model, num_pages=1000, num_slots=len(prompts))
    expected = generate(roomy, prompts, 120)
    topology = load_topology("pd_disagg_1p1d_local.yaml", [*settings, *small])
    with LocalCluster(topology, entries=FORKED) as tight:
        tight.wait_ready()
        answers = complete_all(tight.url, prompts, options)
        assert [answer.token_ids for answer in answers] == expected
        assert instance_loads(tight.url)["D0"]["retractions"] > 0, "the pool was not too small after all"
        assert_whole(tight)


def test_clients_that_leave_at_random_moments_leak_nothing(cluster: LocalCluster) -> None:
    leave_early(cluster.url, prompts_of(200, 400, seed=5), longest_s=0.6, max_tokens=200)
    assert_whole(cluster)
    answer = complete_all(cluster.url, [[1, 2, 3]], [{"max_tokens": 4, "temperature": 0, "ignore_eos": True}])
    assert len(answer[0].token_ids) == 4


def test_a_killed_decode_instance_costs_its_requests_and_p_serves_the_next(
    cluster: LocalCluster,
) -> None:
    prompts = prompts_of(12, 300, seed=9)
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    before = [answer.token_ids for answer in complete_all(cluster.url, prompts, [options] * len(prompts))]
    pid_of_p = cluster.pid("P0")

    for status, text in kill_under_load(cluster, "D0", prompts, max_tokens=2000):
        assert status == 503, f"{status}: {text}"
        assert '"decode_lost"' in text or '"transfer_failed"' in text, text  # P may see it first
    cluster.wait_exit("D0")
    cluster.restart("D0")
    cluster.wait_ready()
    after = [answer.token_ids for answer in complete_all(cluster.url, prompts, [options] * len(prompts))]
    assert after == before
    assert cluster.pid("P0") == pid_of_p, "P was restarted"
    assert_whole(cluster)


def test_a_killed_prefill_instance_fails_only_what_it_had_not_delivered(cluster: LocalCluster) -> None:
    prompts = [*prompts_of(6, 100, seed=13), *prompts_of(30, 1500, seed=14)]
    pid_of_d = cluster.pid("D0")
    ends = kill_under_load(cluster, "P0", prompts, max_tokens=200)
    lost = [text for status, text in ends if status != 200]
    assert len(lost) < len(ends), "KV that had arrived is enough to finish a request"
    for text in lost:
        assert '"prefill_lost"' in text or '"transfer_failed"' in text, text
    cluster.wait_exit("P0")
    cluster.restart("P0")
    cluster.wait_ready()
    assert cluster.pid("D0") == pid_of_d, "D was restarted"
    answer = complete_all(cluster.url, [[1, 2, 3]], [{"max_tokens": 4, "temperature": 0, "ignore_eos": True}])
    assert len(answer[0].token_ids) == 4
    assert_whole(cluster)


def test_a_restarted_router_finds_p_and_d_again(cluster: LocalCluster) -> None:
    pids = [cluster.pid("P0"), cluster.pid("D0")]
    before = len(cluster.logs("D0"))
    cluster.kill("router")
    cluster.wait_exit("router")

    def logged(text: str) -> int:
        return cluster.logs("D0")[before:].count(text)

    wait_until(lambda: logged("no heartbeat reaches the router at") > 0, 10.0, lambda: cluster.logs("D0"))
    cluster.restart("router")
    cluster.wait_ready()
    wait_until(lambda: logged("heartbeats reach the router again") > 0, 10.0, lambda: cluster.logs("D0"))
    assert logged("no heartbeat reaches the router at") == 1
    answer = complete_all(cluster.url, [[1, 2, 3]], [{"max_tokens": 4, "temperature": 0, "ignore_eos": True}])
    assert len(answer[0].token_ids) == 4
    assert [cluster.pid("P0"), cluster.pid("D0")] == pids
    assert_whole(cluster)
