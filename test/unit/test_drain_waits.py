"""The wait of `chitu drain` while the router that it asks starts again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chitu.launch import router_calls
from chitu.launch.router_calls import drain
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.protocol.snapshot import ClusterSnapshot


class RestartingRouter:
    """Answers a drain, is away for some looks, and then has no instance any more."""

    def __init__(self, looks_away: int, empty: ClusterSnapshot) -> None:
        self.looks_away, self._empty = looks_away, empty

    def drain(self, name: str, force: bool) -> int:
        return 7

    def cluster(self) -> ClusterSnapshot:
        if self.looks_away:
            self.looks_away -= 1
            raise RouterUnreachable("no router listens")
        return self._empty


def wait(router: RestartingRouter) -> list[str]:
    said: list[str] = []
    drain(cast(RouterClient, router), ["p0"], force=True, wait=True, say=said.append)
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
