"""Two API keys at a router: neither sees, traces, aborts or delays what the other asks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from nursery import forked
from support.checksum_scheduler import ENTRIES, EngineConfig, make_checksum_model
from support.router_process import wait_until

from chitu.config.cluster_key import with_api_keys, with_cluster_key
from chitu.config.load import load_topology
from chitu.errors import ChituError, UnknownTrace
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive

CLUSTER_KEY = "a-secret-that-must-stay-one-0123456789"
SECRETS = derive(CLUSTER_KEY)
assert SECRETS is not None
A, B, OPERATOR = "sk-of-a", "sk-of-b", SECRETS.token
PROMPT = list(range(20, 90))
ROUTER = "dp_config.router"
LOOKS = 40

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tenants")
    model = make_checksum_model(folder / "model", EngineConfig())
    topology = load_topology(
        "pd_disagg_1p1d_local.yaml",
        [
            *(f"model.path={model}", "model.served_name=m", "model.max_model_len=1024", "cache.num_pages=400"),
            *(f"{ROUTER}.pd_disaggregation.transport=shm", f"trace.dir={folder / 'records'}"),
            f"{ROUTER}.api_key_min_priorities=[-3,0]",
        ],
    )
    topology = with_cluster_key(with_api_keys(topology, (A, B)), CLUSTER_KEY)
    with LocalCluster(topology, entries=forked(ENTRIES), log_dir=str(folder / "logs"), restart=False) as running:
        running.wait_ready(100)
        yield running


def ask(cluster: LocalCluster, key: str, name: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": name}
    if fields.pop("trace", ""):
        headers["x-chitu-trace"] = "1"
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    if path != "/v1/completions":
        del body["prompt"], body["ignore_eos"]
    if path == "/v1/responses":
        del body["max_tokens"]
    return httpx.post(cluster.url + path, json=body, headers=headers, timeout=60, trust_env=False)


def read(cluster: LocalCluster, key: str, path: str) -> str:
    """Return what the router says; of an event stream, the first event."""
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("GET", cluster.url + path, headers=headers, timeout=60, trust_env=False) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines() if path.endswith("events") else iter([reply.read().decode()])
        return next(lines).removeprefix("data: ")


def test_a_key_sees_the_requests_of_its_own_tenant_alone_and_sums_of_pages_nowhere(cluster: LocalCluster) -> None:
    sums = {}
    for key, name in ((A, "a-secret-id"), (B, "b-id"), (OPERATOR, "operator-id")):
        answer = ask(cluster, key, name, return_proof=True, return_page_sums=True).json()
        sums[name] = answer["chitu"]["choices"][0]["attempts"][-1]["page_sums"]
    assert len(set(sums.values())) == 1 and len(sums["b-id"]) > 16, "equal prompts have equal sums"
    for key, seen, hidden in (
        (A, {"a-secret-id"}, {"b-id", "operator-id"}),
        (B, {"b-id"}, {"a-secret-id", "operator-id"}),
        (OPERATOR, set(sums), set[str]()),
    ):
        for path in ("/cluster", "/cluster/events"):
            text = read(cluster, key, path)
            assert {request["request_id"] for request in json.loads(text)["requests"]} == seen
            assert not any(name in text for name in hidden) and sums["b-id"][:16] not in text
    for path in ("/metrics", "/health"):
        assert not any(name in read(cluster, A, path) for name in sums)


def test_no_key_goes_ahead_of_the_others_beyond_its_bound(cluster: LocalCluster) -> None:
    for key, bound in ((A, -3), (B, 0)):
        for path, more in (
            ("/v1/completions", {"n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            assert ask(cluster, key, "p", path, priority=bound, **more).status_code == 200
            refused = ask(cluster, key, "p", path, priority=bound - 1, **more)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "priority")
            assert f"below {bound}" in error["message"] and "router.min_priority" in error["message"]
    assert ask(cluster, OPERATOR, "p", priority=-(1 << 31) + 1).status_code == 200
    other = ask(cluster, B, "p", "/v1/responses", input="hi", max_output_tokens=1, priority=-1)
    assert other.status_code == 200 and "priority" in other.headers["x-chitu-warning"], "a route that has none"


def test_an_id_that_two_keys_use_takes_a_trace_from_neither(cluster: LocalCluster) -> None:
    for key, prompt in ((A, PROMPT), (B, PROMPT[:30])):
        assert ask(cluster, key, "shared-id", trace=True, prompt=prompt, n=2).status_code == 200
    clients = {key: RouterClient(cluster.url, key) for key in (A, B, OPERATOR)}
    for key, num_tokens in ((A, {70}), (B, {30}), (OPERATOR, {70, 30})):
        found: set[int] = set()

        def is_there(key: str = key, wanted: set[int] = num_tokens, found: set[int] = found) -> bool:
            with contextlib.suppress(UnknownTrace):
                records = clients[key].trace("shared-id").records
                found.update(getattr(record, "prompt_tokens", 0) for record in records)
                spans = clients[key].trace("shared-id").timeline.spans
                return wanted <= found and {"P0", "D0"} <= {span.where for span in spans}
            return False

        wait_until(is_there, 30, lambda found=found: found)
        assert found - {0} == num_tokens
    with pytest.raises(ChituError):
        clients[B].trace("a-secret-id")


def test_the_trace_thread_of_an_instance_sleeps_after_the_last_traced_request(cluster: LocalCluster) -> None:
    for n in (1, 2, 3):
        assert ask(cluster, A, f"traced-{n}", trace=True, n=n).status_code == 200
    for name in ("P0", "D0"):
        tasks = Path(f"/proc/{cluster.pid(name)}/task")
        (status,) = [task / "status" for task in tasks.iterdir() if (task / "comm").read_text().strip() == "trace"]
        counts = [""]

        def is_asleep(status: Path = status, counts: list[str] = counts) -> bool:
            """Return whether it did not wake in many looks; while something is traced it does so every 0.05 s."""
            lines = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
            counts.append(lines[0])
            return len(counts) > LOOKS and len(set(counts[-LOOKS:])) == 1

        wait_until(is_asleep, 30, lambda counts=counts: counts[-5:])
