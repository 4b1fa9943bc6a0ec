"""The network between simulated routers and instances: it delivers each message after a while, in order, unless told
otherwise.

A `NetworkWire` is one direction between two ends (routers and processes). Faults are of wires: a message may be lost,
or take longer. What is lost is gone: the senders find out as they do over real connections, where a broken one loses
what was in it. KV is not sent here (`transfers.py`), but takes its rate from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from chitu.simulation.events import Events


@dataclass(slots=True)
class NetworkWire:
    """Faults of one direction between two ends."""

    num_to_lose: float = 0
    """How many of its next messages are lost; infinite: all."""
    delay_s: float = 0.0
    """Seconds that a message takes beside the usual ones."""
    rate: float = 1.0
    """Share of the usual bytes a second."""
    arrival_s: float = -math.inf
    """When its newest message arrives: none overtakes another one."""


class Network:
    def __init__(self, events: Events) -> None:
        self._events = events
        self.message_s = 0.0
        """Seconds that a message takes."""
        self._wires: dict[tuple[Hashable, Hashable], NetworkWire] = {}
        self.num_lost = 0
        """Messages that were lost so far."""

    def wire(self, source: Hashable, target: Hashable) -> NetworkWire:
        """Return the wire from one end to another one, to be given faults."""
        return self._wires.setdefault((source, target), NetworkWire())

    def cut(self, one: Hashable, other: Hashable) -> None:
        """Lose everything between two ends, until `heal`."""
        self.wire(one, other).num_to_lose = self.wire(other, one).num_to_lose = math.inf

    def heal(self) -> None:
        """End all faults. What was lost stays lost."""
        self._wires.clear()

    def rate(self, source: Hashable, target: Hashable) -> float:
        """Return the share of the usual bytes a second that KV gets from one end to another one; 0: none move."""
        wire = self._wires.get((source, target))
        return 1.0 if wire is None else wire.rate if wire.num_to_lose < math.inf else 0.0

    def send(
        self, source: Hashable, target: Hashable, deliver: Callable[..., object], *values: object, ahead_s: float = 0.0
    ) -> None:
        """Call `deliver` with the values when a message that is sent now arrives, `ahead_s` from now, unless it is
        lost."""
        when_s = self._events.clock.now_s + ahead_s + self.message_s
        wire = self._wires.get((source, target)) if self._wires else None
        if wire is not None:
            if wire.num_to_lose > 0:
                wire.num_to_lose -= 1
                self.num_lost += 1
                return
            when_s = wire.arrival_s = max(when_s + wire.delay_s, wire.arrival_s)
        self._events.at(when_s, deliver, *values)
