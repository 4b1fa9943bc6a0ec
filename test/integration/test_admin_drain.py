"""`POST /admin/drain` and `chitu drain` on a real router with fake instances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until

from chitu.config.topology import with_router_ports
from chitu.launch.router_client import RouterClient
from chitu.tools.make_model import make_model

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", family="qwen3")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., RouterUnderTest]]:
    """Yield a function that starts a router (with an API key) and the requested instances."""
    started: list[RouterUnderTest] = []

    def start(instances: str, *options: str) -> RouterUnderTest:
        router = forked_router(tmp_path, model, ["model.served_name=m"], {"CHITU_API_KEYS": "other, secret"})
        started.append(router)
        router.start()
        router.start_worker(instances, "--vocab-size", "100000", *options)
        return router

    yield start
    for router in started:
        router.stop()


def drain(router: RouterUnderTest, body: object, headers: dict[str, str] = KEY) -> httpx.Response:
    return httpx.post(f"{router.url}/admin/drain", json=body, headers=headers, trust_env=False, timeout=60.0)


def chitu_drain(router: RouterUnderTest, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "chitu.cli", "drain", *words, "--url", router.url]
    environment = {**os.environ, "CHITU_API_KEY": "secret"}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


def served_by(router: RouterUnderTest, count: int) -> set[str | None]:
    """Send `count` requests and return the instances that decoded them."""
    for _ in range(count):
        body = {"model": "m", "prompt": "abc", "max_tokens": 2}
        assert (
            httpx.post(
                f"{router.url}/v1/completions", json=body, headers=KEY, trust_env=False, timeout=60.0
            ).status_code
            == 200
        )
    requests = RouterClient(router.url, "secret").cluster().requests
    return {request.decode for request in [r for r in requests if r.ended_at_s is not None][-count:]}


def test_a_key_is_asked_for_and_mistakes_are_named(start: Callable[..., RouterUnderTest]) -> None:
    router = start("P0,D0")
    assert drain(router, {"instance": "D0"}, headers={}).json()["error"]["code"] == "invalid_api_key"
    unknown = drain(router, {"instance": "D7"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_instance")
    assert "it has P0, D0" in unknown.json()["error"]["message"]
    last = drain(router, {"instance": "D0"})
    assert (last.status_code, last.json()["error"]["code"]) == (409, "last_instance")
    assert drain(router, {"instance": 3}).status_code == 400
    as_text = httpx.post(f"{router.url}/admin/drain", content=json.dumps({"instance": "D0"}), headers=KEY, timeout=60.0)
    assert as_text.status_code in (400, 409)
    assert router.members() == {"P0", "D0"}, "nothing of all that drained anything"


def test_who_may_join_is_told_the_ports_and_no_key(start: Callable[..., RouterUnderTest]) -> None:
    router = start("P0,D0")
    assert (
        httpx.get(f"{router.url}/admin/topology", trust_env=False, timeout=60.0).json()["error"]["code"]
        == "invalid_api_key"
    )
    text = httpx.get(f"{router.url}/admin/topology", headers=KEY, trust_env=False, timeout=60.0).text
    assert "secret" not in text
    topology = RouterClient(router.url, "secret").topology()
    assert topology.dp_config.router.api_keys == ()
    ports = {name: port for name, port in router.ports.items() if name.endswith("_port")}
    assert len(ports) == 5
    assert with_router_ports(topology, ports) == topology


def test_a_drained_instance_gets_nothing_new_and_leaves(start: Callable[..., RouterUnderTest]) -> None:
    router = start("P0,D0,D1")
    assert served_by(router, 4) == {"D0", "D1"}
    done = chitu_drain(router, "d1")
    assert done.returncode == 0, done.stderr
    assert "D1 has left" in done.stdout
    assert router.members() == {"P0", "D0"}
    assert served_by(router, 4) == {"D0"}
    refused = chitu_drain(router, "D0")
    assert refused.returncode == 1 and "last_instance" in refused.stderr and "no decode" in refused.stderr
    forced = chitu_drain(router, "D0", "--force")
    assert forced.returncode == 0, forced.stderr
    assert router.members() == {"P0"}


def test_what_runs_is_finished_while_others_take_the_new_requests(start: Callable[..., RouterUnderTest]) -> None:
    router = start("P0,D0,D1", "--step-s", "0.02")
    body = {"model": "m", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{router.url}/v1/completions", json=body, headers=KEY, trust_env=False, timeout=60.0
    ) as long:
        lines = long.iter_lines()
        next(lines)
        (running,) = [r for r in RouterClient(router.url, "secret").cluster().requests if r.ended_at_s is None]
        assert drain(router, {"instance": running.decode}).json()["status"] == "draining"
        assert drain(router, {"instance": running.decode}).status_code == 200, "asking twice changes nothing"
        assert running.decode not in served_by(router, 3)
        status = {i["name"]: i["draining"] for i in router.health()["instances"]}
        assert status[running.decode], "it stays as long as its request runs"
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] and "error" not in "".join(rest)
    wait_until(lambda: running.decode not in router.members(), 10, "the drained instance to leave")
