"""What `chitu upgrade --check` says of a cluster."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
from support.wire_samples import filled

from chitu.launch.router_client import RouterClient
from chitu.protocol import OLDEST_VERSION, PROTOCOL_VERSION
from chitu.protocol.releases import ADDED, Added
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.protocol.wire import Wire
from chitu.tools.upgrade import check_upgrade

UP = InstanceSnapshot("P0", "prefill", "up", "h", 1, "7", None, release="0.2.0", protocol=PROTOCOL_VERSION)


class FakeClient:
    def __init__(self, protocol: int, *instances: InstanceSnapshot) -> None:
        whole: ClusterSnapshot = filled(ClusterSnapshot)
        self._cluster = msgspec.structs.replace(whole, protocol=protocol, version="9.9", instances=instances)

    def cluster(self) -> ClusterSnapshot:
        return self._cluster


def said(protocol: int, *instances: InstanceSnapshot) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = check_upgrade(cast(RouterClient, FakeClient(protocol, *instances)), lines.append)
    return code, lines


def test_processes_of_the_release_before_work_and_an_older_router_does_not_tell_of_its_members() -> None:
    old = msgspec.structs.replace(UP, name="D0", release="", protocol=0)
    down = msgspec.structs.replace(UP, name="D1", status="down")
    code, lines = said(OLDEST_VERSION, UP, old, down)
    assert code == 0 and lines[3] == "D1: down"
    assert f"D0: release before 0.2.0, wire {OLDEST_VERSION}: works" in lines[2]
    assert "one by one" in lines[-1]


@pytest.mark.parametrize("protocol", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_process_of_another_release_is_named(protocol: int) -> None:
    code, lines = said(PROTOCOL_VERSION, UP, msgspec.structs.replace(UP, name="D0", protocol=protocol))
    assert code == 1 and lines[2].startswith("D0: ") and "works" not in lines[2]
    assert "do not mix" in lines[-1]


def test_what_an_older_process_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithVideo(Wire, frozen=True):
        frames: int = 0

    monkeypatch.setitem(ADDED, WithVideo, {"frames": Added(PROTOCOL_VERSION, "video")})
    old = msgspec.structs.replace(UP, protocol=OLDEST_VERSION)
    assert said(PROTOCOL_VERSION, old)[1][1].endswith("without video, videos whose frames have times")
