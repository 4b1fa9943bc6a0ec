"""Heartbeats of an instance: at once if there is news, while what is counted by the interval waits for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import msgspec
import zmq
from test_coordination import info

from chitu.config.schema import DeadlineConfig
from chitu.instance.comm import CommLoop, RouterAddress
from chitu.instance.heartbeats import Heartbeats, InstanceReport
from chitu.instance.weights import WeightsKeeper
from chitu.protocol import Heartbeat, InstanceInfo, LoadReport
from chitu.protocol.weights import WeightsReport
from chitu.types import Role

INFO = msgspec.structs.replace(info(Role.DECODE, incarnation=7), yields=True)


class Owner:
    """An added instance that always has news, and the heartbeats that its comm thread would send."""

    def __init__(self, deadlines: DeadlineConfig, beats: int) -> None:
        """`beats`: heartbeats until it is over, unless it is abandoned before."""
        contacts = SimpleNamespace(num_views=[0], joined=True, joined_routers=(0,))
        received = SimpleNamespace(acks=lambda: ())
        addresses = [SimpleNamespace(address=RouterAddress("127.0.0.1", 9, 9, 9))]
        comm = SimpleNamespace(
            context=zmq.Context.instance(), routers=addresses, contacts=contacts, received=received, num_reads=3
        )
        comm.frames_for_routers = self.frames
        self.heartbeats = Heartbeats(cast(CommLoop, comm), deadlines, self)
        self.sent: list[Heartbeat] = []
        self.members: list[tuple[InstanceInfo, bool]] = []
        self.intervals, self.looks, self.was_abandoned = 0, 0, False
        self.is_over = threading.Event()
        self._beats = beats

    def frames(self, message: Heartbeat) -> list[bytes]:
        self.sent.append(message)
        if len(self.sent) == self._beats:
            self.is_over.set()
        self.heartbeats.soon()
        return [b""]

    def run(self) -> None:
        self.heartbeats.start(lambda *member: self.members.append(member))
        self.heartbeats.soon()
        assert self.is_over.wait(60)
        self.heartbeats.end()
        self.heartbeats.join(60)

    def report(self) -> InstanceReport:
        keeper = SimpleNamespace(report=WeightsReport())
        return InstanceReport(INFO, LoadReport(waiting=len(self.sent)), cast(WeightsKeeper, keeper), (5,))

    def num_turns(self) -> int:
        self.looks += 1
        return self.looks

    def on_interval(self) -> None:
        self.intervals += 1
        if self.was_abandoned:
            self.is_over.set()

    def on_silent_router(self, router: int, silence_s: float) -> None:
        pass

    def is_leaving(self) -> bool:
        return self.was_abandoned

    def on_abandoned(self) -> None:
        self.was_abandoned = True


def test_news_leave_at_once_and_no_silence_is_counted_by_them() -> None:
    """An interval of an hour is not over after five heartbeats, whatever they were sent for."""
    made = Owner(DeadlineConfig(heartbeat_interval_s=3600.0), 5)
    made.run()
    assert [beat.load.waiting for beat in made.sent[:5]] == [0, 1, 2, 3, 4]
    assert {(beat.role, beat.incarnation, beat.reads, beat.silent) for beat in made.sent} == {(Role.DECODE, 7, 3, (5,))}
    assert (made.intervals, made.looks, made.was_abandoned) == (0, 0, False)
    assert made.members == [(INFO, True)]


def test_an_added_instance_that_hears_no_router_ends_and_is_no_member_any_more() -> None:
    made = Owner(DeadlineConfig(heartbeat_interval_s=0.05, router_s=0.1), 10**9)
    made.run()
    assert made.was_abandoned and made.members == [(INFO, True), (INFO, False)]
