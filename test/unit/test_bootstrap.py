"""The bootstrap directory: the P of the cluster view, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from chitu.kv_transfer.bootstrap import BootstrapServer
from chitu.net.curve import derive
from chitu.protocol import ClusterView, InstanceInfo, KVLayout, RouteEntry
from chitu.types import Role

LAYOUT = KVLayout("hash", 2, 2, 16, 16, "float32", 100, tp_size=2)


def member(role: Role, rank: int, incarnation: int = 1) -> InstanceInfo:
    return InstanceInfo(role, rank, incarnation, "127.0.0.1", 29620, 5000 + rank, LAYOUT, 512)


NO_RANKS = ("7", "x", "", "-1", "1e3", "%ff", "9" * 5000, "2&engine_rank=z")
VIEW = ClusterView(7, 1, (member(Role.DECODE, 0), member(Role.PREFILL, 10), member(Role.PREFILL, 2, 9)))


def call(server: BootstrapServer, method: str, target: str, authorization: str = "") -> tuple[int, Any]:
    """Send one request through the ASGI application."""
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("a body is of no interest")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", authorization.encode())] if authorization else []
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
    asyncio.run(server.app(scope, receive, send))
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])


def test_every_prefill_of_the_newest_view_is_listed_and_found_by_rank() -> None:
    views = [VIEW]
    server = BootstrapServer(lambda: views[-1])
    status, found = call(server, "GET", "/route?engine_rank=2")
    entry = RouteEntry(Role.PREFILL, 2, "127.0.0.1", 5002, 2, 9, LAYOUT)
    assert status == 200 and msgspec.convert(found, RouteEntry) == entry
    status, listed = call(server, "GET", "/route")
    assert status == 200 and [item["engine_rank"] for item in listed] == [2, 10]
    views.append(msgspec.structs.replace(VIEW, instances=VIEW.instances[:2]))
    assert [item["engine_rank"] for item in call(server, "GET", "/route")[1]] == [10]
    assert call(server, "GET", "/route?engine_rank=2")[0] == 404
    assert call(server, "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("PUT", "/route", 405),
        ("DELETE", "/route", 405),
        ("POST", "/health", 405),
        ("GET", "/elsewhere", 404),
        *(("GET", f"/route?engine_rank={rank}", 404) for rank in NO_RANKS),
    ],
)
def test_wrong_requests_get_their_status_and_a_message(method: str, target: str, status: int) -> None:
    found, answer = call(BootstrapServer(lambda: VIEW), method, target)
    assert found == status and 0 < len(answer["error"]["message"]) < 200


def test_only_health_is_open_where_the_cluster_has_a_key() -> None:
    secrets = derive("a key of the cluster")
    server = BootstrapServer(lambda: VIEW, secrets)
    assert call(server, "GET", "/health")[0] == 200
    for wrong in ("", "Bearer wrong", f"Basic {secrets.token}"):
        assert call(server, "GET", "/route", wrong)[0] == call(server, "PUT", "/route", wrong)[0] == 401
    assert len(call(server, "GET", "/route", f"Bearer {secrets.token}")[1]) == 2
