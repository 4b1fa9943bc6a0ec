"""A router of three API processes: one cluster to its clients, whichever process answers, and whichever dies."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from completions import complete_all, instance_loads, is_whole
from nursery import FORKED, forked_router
from support.router_process import RouterUnderTest, wait_until

from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import with_router_ports
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.protocol.snapshot import ClusterSnapshot, WorkerSnapshot
from chitu.tools.make_model import make_model

WORKERS = 3
WAIT_S = 60.0
"""Generous timeout: three Pythons start on as few as two busy cores."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", family="qwen3")


@pytest.fixture
def router(model: Path, tmp_path: Path) -> Iterator[RouterUnderTest]:
    """Yield a router with fake instances: the text of an answer is its prompt, over and over."""
    router = forked_router(tmp_path, model, ("model.served_name=m", f"dp_config.router.workers={WORKERS}"))
    try:
        router.start()
        yield router
    finally:
        router.stop()


def get(router: RouterUnderTest, path: str) -> httpx.Response:
    """Get a path on a new connection, and so from any API process."""
    response = httpx.get(f"{router.url}{path}", timeout=30.0, trust_env=False)
    assert response.status_code == 200, response.text
    return response


def from_each(router: RouterUnderTest, path: str) -> dict[str, httpx.Response]:
    """Return the answer of every API process to the same question."""
    answers: dict[str, httpx.Response] = {}

    def ask() -> bool:
        answer = get(router, path)
        answers[answer.headers["x-chitu-worker"]] = answer
        return len(answers) == WORKERS

    wait_until(ask, WAIT_S, lambda: sorted(answers))
    return answers


def connection_to(router: RouterUnderTest, worker: int) -> http.client.HTTPConnection:
    """Return a kept-alive connection to that API process."""
    for _ in range(200):
        connection = http.client.HTTPConnection("127.0.0.1", router.ports["port"], timeout=30)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.headers["x-chitu-worker"] == str(worker):
            return connection
        connection.close()
    raise AssertionError(f"no connection got to process {worker}")


def complete(router: RouterUnderTest, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 6, "return_token_ids": True, **options}
    return httpx.post(f"{router.url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)


def workers(router: RouterUnderTest | LocalCluster) -> tuple[WorkerSnapshot, ...]:
    return RouterClient(router.url).cluster().workers


def metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


async def stream(client: httpx.AsyncClient, max_tokens: int, started: asyncio.Queue[str]) -> tuple[str, bool]:
    """Stream a request; put the serving API process into `started` at the first data. Return that process and whether
    the stream was complete."""
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    text = worker = ""
    with contextlib.suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            worker = response.headers["x-chitu-worker"]
            async for line in response.aiter_lines():
                if not text:
                    started.put_nowait(worker)
                text += line + "\n"
    return worker, text.rstrip().endswith("data: [DONE]") and '"error"' not in text


Streams = list[asyncio.Task[tuple[str, bool]]]


async def start_streams(client: httpx.AsyncClient, count: int, max_tokens: int) -> tuple[Streams, int]:
    """Start streams and wait until all have begun. Return them and the replica (never process 0) that serves most of
    them. Which process serves a stream is random; that the replicas get none of a dozen happens once in 500,000
    times."""
    started: asyncio.Queue[str] = asyncio.Queue()
    streams = [asyncio.create_task(stream(client, max_tokens, started)) for _ in range(count)]
    served = Counter([await started.get() for _ in streams])
    assert set(served) - {"0"}, served
    return streams, max((int(index) for index in served if index != "0"), key=lambda index: served[str(index)])


async def test_connections_and_requests_land_on_all_and_tokens_are_right(router: RouterUnderTest) -> None:
    router.start_worker("P0,P1,D0,D1,D2", "--vocab-size", "100000")
    served: Counter[str] = Counter()

    async def client(number: int) -> None:
        prompt = [number, 2 * number + 1, 3]
        async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as session:
            for max_tokens in (7, 20):
                body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
                answer = await session.post("/v1/completions", json={**body, "ignore_eos": True})
                assert answer.status_code == 200, answer.text
                expected = (prompt * max_tokens)[:max_tokens]
                assert answer.json()["choices"][0]["token_ids"] == expected
                served[answer.headers["x-chitu-worker"]] += 1

    await asyncio.gather(*(client(number) for number in range(30)))
    assert set(served) == {"0", "1", "2"}, served
    cluster = RouterClient(router.url).cluster()
    assert len({(r.prefill, r.decode) for r in cluster.requests}) == 6, "every pair was used"
    assert cluster.in_flight == 0


def test_all_show_the_same_cluster_and_a_request_is_in_it_as_soon_as_it_was_answered(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000")
    for _ in range(4):
        answer = complete(router)
        for snapshot in from_each(router, "/cluster").values():
            requests = [r["request_id"] for r in snapshot.json()["requests"] if r["state"] == "finished"]
            assert requests[-1] == answer.headers["x-request-id"]

    snapshots = [answer.json() for answer in from_each(router, "/cluster").values()]
    for snapshot in snapshots:
        del snapshot["time_s"]
        for instance in snapshot["instances"]:
            del instance["load"]  # a heartbeat may come between two requests
    assert snapshots[0] == snapshots[1] == snapshots[2]
    assert len(snapshots[0]["requests"]) == 4 and len(snapshots[0]["workers"]) == WORKERS

    health = [answer.json() for answer in from_each(router, "/health").values()]
    assert health[0] == health[1] == health[2]
    for answer in from_each(router, "/metrics").values():
        assert metric(answer.text, "chitu_requests_total") == 4
        assert metric(answer.text, "chitu_router_workers") == WORKERS
        assert 'chitu_requests_finished_total{reason="length"} 4.0' in answer.text

    ports = {name: port for name, port in router.ports.items() if name.endswith("_port")}
    for answer in from_each(router, "/admin/topology").values():
        topology = msgspec.json.decode(answer.content, type=Topology)
        assert with_router_ports(topology, ports) == topology


def test_an_event_stream_shows_what_another_process_serves(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000", "--step-s", "0.05")
    with httpx.stream("GET", f"{router.url}/cluster/events", timeout=30.0, trust_env=False) as events:
        watched = events.headers["x-chitu-worker"]
        lines = events.iter_lines()
        next(lines)
        results: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: results.append(complete(router, max_tokens=20))) for _ in range(12)]
        for thread in threads:
            thread.start()
        seen: set[str] = set()
        for line in lines:
            if line.startswith("data: "):
                seen |= {r["state"] for r in httpx.Response(200, text=line[6:]).json()["requests"]}
            if "finished" in seen:
                break
        for thread in threads:
            thread.join()
    assert {"decode", "finished"} <= seen
    assert {result.headers["x-chitu-worker"] for result in results} - {watched}


async def test_an_aborted_request_ends_in_whichever_process_it_runs(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000", "--step-s", "0.02")
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    pairs: list[tuple[str, str]] = []

    async def abort(rid: str) -> httpx.Response:
        """Send an abort on its own connection."""
        async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as client:
            return await client.post("/abort_request", json={"rid": rid})

    async def one(client: httpx.AsyncClient, rid: str) -> None:
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": rid}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            aborted = await abort(rid)
            rest = "".join([line async for line in lines]) if aborted.text == '{"aborted":1}' else ""
            served, asked = response.headers["x-chitu-worker"], aborted.headers["x-chitu-worker"]
            assert rest, f"{served} served {rid}, {asked} was asked: {aborted.status_code} {aborted.text}"
            assert '"code":"cancelled"' in rest, rest[-400:]
            pairs.append((served, asked))
        assert (await abort(rid)).json() == {"aborted": 0}

    async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(one(client, f"r{number}") for number in range(16)))
        # A process that does not answer may have the request: the answer is an error, not a silent zero.
        stopped = workers(router)[1].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            answer = await abort("r0")
            assert answer.status_code == 500, (answer.headers, answer.text)
        finally:
            os.kill(stopped, signal.SIGCONT)
    assert any(served != asked for served, asked in pairs), pairs


def test_an_instance_is_drained_through_any_of_them_and_all_know(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0,D1", "--vocab-size", "100000")
    refused = httpx.post(f"{router.url}/admin/drain", json={"instance": "P0"}, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_instance")
    unknown = httpx.post(f"{router.url}/admin/drain", json={"instance": "D7"}, trust_env=False)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_instance")
    drained = httpx.post(f"{router.url}/admin/drain", json={"instance": "d1"}, trust_env=False)
    assert drained.json()["status"] == "draining" and drained.json()["instance"] == "D1"
    for answer in from_each(router, "/health").values():
        left = {i["name"] for i in answer.json()["instances"] if not i["draining"]}
        assert left == {"P0", "D0"}
    wait_until(lambda: router.members() == {"P0", "D0"}, WAIT_S, router.members)
    assert [complete(router).status_code for _ in range(4)] == [200] * 4


def test_a_pause_through_any_of_them_holds_the_requests_of_all(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000")
    assert complete(router).status_code == 200
    for body, reply in (({"mode": "finish"}, "finish"), ({"mode": "keep"}, "keep")):
        paused = httpx.post(f"{router.url}/admin/pause", json=body, trust_env=False)
        assert (paused.status_code, paused.json()["paused"]) == (200, reply)
        late = [complete(router, headers={"X-Request-Timeout": "0.1"}) for _ in range(6)]
        assert {answer.status_code for answer in late} == {504}
        assert {"the cluster is paused" in answer.text for answer in late} == {True}
    assert httpx.post(f"{router.url}/admin/resume", trust_env=False).json()["paused"] == ""
    assert [complete(router).status_code for _ in range(6)] == [200] * 6


async def test_a_killed_process_takes_only_its_own_connections_and_comes_back(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0,D1", "--vocab-size", "100000", "--step-s", "0.02")
    before = workers(router)

    limits = httpx.Limits(max_connections=12)
    async with httpx.AsyncClient(base_url=router.url, timeout=60.0, limits=limits, trust_env=False) as client:
        streams, victim = await start_streams(client, 12, 400)
        async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as watcher:
            # Two seconds of tokens: the process reports its counts to the router twice a second.
            while min(r["output_tokens"] for r in (await watcher.get("/cluster")).json()["requests"]) < 100:
                await asyncio.sleep(0.05)
        os.kill(before[victim].pid, signal.SIGKILL)
        # New requests are served as usual.
        late = [asyncio.create_task(stream(client, 3, asyncio.Queue())) for _ in range(6)]
        # Rooms of the dead process end on the instances while the other processes' rooms go on.
        async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as watcher:
            while True:
                cluster = (await watcher.get("/cluster")).json()
                running = sum(i["load"]["running"] for i in cluster["instances"])
                left = sum(not task.done() for task in streams)
                if all(task.done() for task in late) and cluster["in_flight"] == running == left < 12:
                    break
                assert left, (cluster["in_flight"], running)
                await asyncio.sleep(0.05)
        results = await asyncio.gather(*streams, *late)
    assert all(done == (worker != str(victim)) for worker, done in results[:12]), (victim, results)
    assert [done for _, done in results[12:]] == [True] * 6
    wait_until(lambda: len(workers(router)) == WORKERS, WAIT_S, lambda: router.log[-2000:])
    after = workers(router)
    assert [w.index for w in after if w.pid != before[w.index].pid] == [victim]
    for answer in from_each(router, "/metrics").values():
        # What the dead process had reported is not lost.
        assert metric(answer.text, "chitu_requests_total") == 12 + 6
    for answer in from_each(router, "/cluster").values():
        snapshot = answer.json()
        assert snapshot["in_flight"] == 0
    wait_until(
        lambda: all(i["load"]["running"] == 0 for i in get(router, "/cluster").json()["instances"]),
        WAIT_S,
        lambda: get(router, "/cluster").json()["instances"],
    )


def test_connections_to_a_process_that_hangs_are_served_by_another(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000")
    hung = workers(router)[1]
    os.kill(hung.pid, signal.SIGSTOP)
    try:
        # Some requests arrive before the hang is detected.
        answers = [complete(router) for _ in range(12)]
        wait_until(lambda: f"(pid {hung.pid}): no heartbeat" in router.log, WAIT_S, lambda: router.log[-2000:])
        answers += [complete(router) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-chitu-worker"] for answer in answers} == {"0", "2"}
        snapshot = RouterClient(router.url).cluster()
        assert {i.status for i in snapshot.instances} == {"up"}
        assert "is gone" not in router.log
    finally:
        os.kill(hung.pid, signal.SIGCONT)
    assert set(from_each(router, "/health")) == {"0", "1", "2"}
    assert {w.pid for w in workers(router)} >= {hung.pid}


async def test_sigterm_under_load_finishes_what_runs_and_exits_with_0(router: RouterUnderTest) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000", "--step-s", "0.01")
    pids = [w.pid for w in workers(router)]

    limits = httpx.Limits(max_connections=12)
    async with httpx.AsyncClient(base_url=router.url, timeout=60.0, limits=limits, trust_env=False) as client:
        streams, _ = await start_streams(client, 12, 100)
        router.signal(signal.SIGTERM)
        results = await asyncio.gather(*streams)
    assert [done for _, done in results] == [True] * 12
    assert router.process is not None and router.process.wait(20) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_replica_that_is_told_to_end_finishes_what_it_serves_and_is_started_again(
    router: RouterUnderTest,
) -> None:
    router.start_worker("P0,D0", "--vocab-size", "100000", "--step-s", "0.01")
    before = workers(router)

    def router_log() -> str:
        return router.log[-2000:]

    limits = httpx.Limits(max_connections=12)
    async with httpx.AsyncClient(base_url=router.url, timeout=60.0, limits=limits, trust_env=False) as client:
        streams, told = await start_streams(client, 12, 100)
        kept = connection_to(router, told)
        os.kill(before[told].pid, signal.SIGTERM)
        wait_until(lambda: f" router.{told} I chitu.serve.api_endpoint: draining" in router.log, WAIT_S, router_log)
        kept.request("POST", "/v1/completions", '{"prompt": [5, 6, 7], "max_tokens": 3}')
        answer = kept.getresponse()
        assert (answer.status, answer.headers["connection"]) == (200, "close"), answer.read()
        async with httpx.AsyncClient(base_url=router.url, timeout=60.0, trust_env=False) as new:
            late = [await stream(new, 3, asyncio.Queue()) for _ in range(6)]
        results = [*await asyncio.gather(*streams), *late]
    assert all(done for _, done in results), (told, results)
    wait_until(lambda: f"router.{told} is started again" in router.log, WAIT_S, router_log)
    wait_until(lambda: len(workers(router)) == WORKERS, WAIT_S, router_log)
    assert workers(router)[told].pid != before[told].pid


def test_replicas_end_with_the_process_that_started_them(router: RouterUnderTest) -> None:
    pids = [w.pid for w in workers(router)]
    assert router.process is not None
    router.process.kill()
    router.process.wait(20)
    wait_until(lambda: not any(map(_runs, pids)), 20.0, lambda: pids)


def test_a_port_that_another_router_shares_among_its_own_is_taken(router: RouterUnderTest, tmp_path: Path) -> None:
    other = forked_router(tmp_path / "other", router.model, router.overrides, ports={"port": router.ports["port"]})
    other.folder.mkdir()
    with pytest.raises(RuntimeError, match="ended with 2") as caught:
        other.start()
    assert f"error: dp_config.router.port: cannot listen on 127.0.0.1:{router.ports['port']}" in str(caught.value)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_model_that_is_not_there_ends_the_start_with_a_reason(tmp_path: Path) -> None:
    router = forked_router(tmp_path, tmp_path / "nothing", (f"dp_config.router.workers={WORKERS}",))
    with pytest.raises(RuntimeError, match="ended with 2") as caught:
        router.start()
    assert f"error: model.path: {tmp_path}/nothing" in str(caught.value)


def test_real_instances_lose_no_page_when_an_api_process_dies_with_its_requests(model: Path) -> None:
    settings = [
        f"model.path={model}",
        "model.served_name=m",
        "cache.num_pages=400",
        "scheduler.threads=1",
        f"dp_config.router.workers={WORKERS}",
    ]
    prompts = [[number, 9, 8, 7] for number in range(9)]
    options = [{"max_tokens": 30, "temperature": 0, "ignore_eos": True}] * len(prompts)
    with LocalCluster(load_topology("pd_disagg_1p1d_local", settings), entries=FORKED) as cluster:
        cluster.wait_ready(200)
        expected = [answer.token_ids for answer in complete_all(cluster.url, prompts, options)]
        assert len(expected) == len(prompts)
        client = RouterClient(cluster.url)
        pids = [worker.pid for worker in client.cluster().workers]

        async def run() -> tuple[int, list[tuple[str, bool]]]:
            limits = httpx.Limits(max_connections=12)
            async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits, trust_env=False) as session:
                streams, victim = await start_streams(session, 12, 400)
                os.kill(pids[victim], signal.SIGKILL)
                return victim, await asyncio.gather(*streams)

        victim, results = asyncio.run(run())
        assert all(done == (worker != str(victim)) for worker, done in results), (victim, results)
        loads: dict[str, dict[str, int]] = {}

        def whole() -> bool:
            loads.update(instance_loads(cluster.url))
            return set(loads) == {"P0", "D0"} and all(map(is_whole, loads.values()))

        wait_until(whole, WAIT_S, lambda: loads)
        wait_until(lambda: len(client.cluster().workers) == WORKERS, WAIT_S, lambda: cluster.logs("router")[-2000:])
        assert [answer.token_ids for answer in complete_all(cluster.url, prompts, options)] == expected
        snapshot: ClusterSnapshot = client.cluster()
        assert snapshot.in_flight == 0 and {i.status for i in snapshot.instances} == {"up"}
        assert "page accounting" not in cluster.logs("P0") + cluster.logs("D0")
    assert cluster.members["router"].exit_code == 0
