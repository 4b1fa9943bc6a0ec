"""The wait of `chitu drain` while the router that it asks starts again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chitu.errors import UnknownInstance
from chitu.launch import router_calls
from chitu.launch.router_calls import drain
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.protocol.snapshot import ClusterSnapshot


class RestartingRouter:
    """Answers a drain, is away for some looks, and then has no instance any more."""

    def __init__(self, looks_away: int, empty: ClusterSnapshot, asks_unknown: int = 0) -> None:
        self.looks_away, self._empty, self.asks_unknown = looks_away, empty, asks_unknown

    def drain(self, name: str, force: bool) -> str:
        if self.asks_unknown:
            self.asks_unknown -= 1
            raise UnknownInstance(name)
        return "7"

    def cluster(self) -> ClusterSnapshot:
        if self.looks_away:
            self.looks_away -= 1
            raise RouterUnreachable("no router listens")
        return self._empty


def wait(router: RestartingRouter, patience_s: float = 0.0) -> list[str]:
    said: list[str] = []
    client = cast(RouterClient, router)
    drain(client, ["p0"], force=True, wait=True, say=said.append, patience_s=patience_s)
    return said


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> ClusterSnapshot:
    monkeypatch.setattr(router_calls, "POLL_S", 0.01)
    without: Any = type("Empty", (), {"instances": ()})()
    return cast(ClusterSnapshot, without)


def test_a_drain_waits_on_while_the_router_starts_again(empty: ClusterSnapshot) -> None:
    router = RestartingRouter(5, empty)
    assert any("P0 has left" in line for line in wait(router)) and router.looks_away == 0


def test_a_router_that_stays_away_ends_the_wait(empty: ClusterSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_calls, "AWAY_S", 0.05)
    with pytest.raises(RouterUnreachable):
        wait(RestartingRouter(10_000, empty))


def test_a_container_asks_again_where_the_router_knows_no_instance_yet(empty: ClusterSnapshot) -> None:
    assert any("P0 has left" in line for line in wait(RestartingRouter(0, empty, 3), patience_s=30.0))
    with pytest.raises(UnknownInstance):  # as `chitu drain P0` has no patience with a name that there is not
        wait(RestartingRouter(0, empty, 3))
