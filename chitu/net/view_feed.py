"""The cluster view as a whole and numbered changes of it. Sans IO.

The router's `ViewSender` counts a change of many members as one; each reader's `ViewReceiver` follows it. A view of n
members has some 200 n bytes, so it is sent whole only to a reader that asks: a new one, and one that missed a change.
The socket's owner asks by subscribing (`ask_for_whole`), which a socket repeats by itself with every new connection.

Invariants: after each message that `take` accepts, `ViewReceiver.view` equals a view that the router had, with its
number. A reader that missed a number keeps its view, and accepts no later change, until it has a whole one.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

import msgspec
import zmq

from chitu.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    ClusterView,
    InstanceInfo,
    LostInstance,
    ViewChange,
    ViewMessage,
    view_topic,
    whole_topic,
)
from chitu.protocol.weights import WeightsOrder
from chitu.types import Role

KEPT_DEAD = 1024
"""Deaths listed in a view; peers remember those of their own peers."""
KEPT_LOST = 64
"""Losses listed in a view, with their reasons. A change lists all of its own."""
ASK_S = 1.0
"""Pause before a reader asks again."""

Place = tuple[Role, int]
_place: Callable[[InstanceInfo], Place] = attrgetter("role", "engine_rank")


class ViewSender:
    """The router's end: the newest view, and what has changed since."""

    def __init__(self, router_incarnation: int) -> None:
        self.view = ClusterView(router_incarnation, 0, ())
        """View of the last number."""
        self.is_changed = False
        """Whether there is a change that has no number yet."""
        self._instances: list[InstanceInfo] = []
        """Members as they are now, by role and rank."""
        self._cache_flush = 0
        self._weights = WeightsOrder()
        self._joined: dict[Place, InstanceInfo] = {}
        self._left: dict[Place, None] = {}
        self._dead: list[int] = []
        self._lost: list[LostInstance] = []

    def put(self, instance: InstanceInfo) -> None:
        """Add a member, or replace the record of the one in its place."""
        place = _place(instance)
        _set(self._instances, place, [instance])
        self._joined[place] = instance
        self._left.pop(place, None)
        self.is_changed = True

    def remove(self, instance: InstanceInfo, lost: LostInstance) -> None:
        place = _place(instance)
        _set(self._instances, place, [])
        self._joined.pop(place, None)
        self._left[place] = None
        self._lost.append(lost)
        self.is_changed = True

    def note_dead(self, incarnations: list[int]) -> None:
        self._dead += incarnations
        self.is_changed = True

    def set_cache_flush(self, number: int) -> None:
        self._cache_flush, self.is_changed = number, True

    def set_weights(self, order: WeightsOrder) -> None:
        self._weights, self.is_changed = order, True

    def next_change(self) -> ViewChange:
        """Return what changed since the last number, with the next one; from now on `view` includes it. If nothing
        changed, the result says which number is the newest."""
        view = self.view
        change = ViewChange(
            router_incarnation=view.router_incarnation,
            version=view.version + self.is_changed,
            after=view.version,
            joined=tuple(self._joined.values()),
            left=tuple(self._left),
            cache_flush=self._cache_flush,
            weights=self._weights,
            dead=tuple(self._dead),
            lost=tuple(self._lost),
        )
        if self.is_changed:
            self.view = _changed(view, change, tuple(self._instances))
            self.is_changed = False
            for seen in (self._joined, self._left, self._dead, self._lost):
                seen.clear()
        return change


class ViewReceiver:
    """A reader's end."""

    def __init__(self, now_s: float) -> None:
        """`now_s`: time at which its socket subscribes to `topic`."""
        self.protocol = PROTOCOL_VERSION
        """Version of the wire in which it asks for views."""
        self._suffix = secrets.token_bytes(8)
        self.view = ClusterView(0, -1, ())
        """Newest view that is known; that of no router at first."""
        self.is_current = False
        """Whether no change is known to be missing."""
        self._asked_s = now_s

    @property
    def topic(self) -> bytes:
        """Topic of the whole views that are sent to this reader alone."""
        return whole_topic(self.protocol) + self._suffix

    @property
    def topics(self) -> tuple[bytes, bytes]:
        """What its socket subscribes to: topics of the changes and of its whole views."""
        return view_topic(self.protocol), self.topic

    def take(self, message: ViewMessage) -> bool:
        """Take a message and return whether `view` is the router's newest now, as far as this message tells."""
        view = self.view
        is_same_router = message.router_incarnation == view.router_incarnation
        if is_same_router and message.version <= view.version:  # a repetition, or the tail of an older connection
            self.is_current |= isinstance(message, ClusterView) and message.version == view.version
        elif isinstance(message, ClusterView):
            self.view, self.is_current = message, True
        elif is_same_router and message.after == view.version:
            self.view, self.is_current = _changed(view, message, _members(view, message)), True
        else:
            self.is_current = False
        return self.is_current

    def should_ask(self, now_s: float) -> bool:
        """Return whether to `ask_for_whole` now. The caller then does so."""
        if self.is_current or now_s < self._asked_s + ASK_S:
            return False
        self._asked_s = now_s
        return True


def ask_for_whole(socket: zmq.Socket[bytes], topic: bytes) -> None:
    """Have the router send a whole view to this SUB socket, which has subscribed to the topic before."""
    socket.setsockopt(zmq.UNSUBSCRIBE, topic)
    socket.setsockopt(zmq.SUBSCRIBE, topic)


class Readers:
    """What the readers of an XPUB socket ask for, as their subscriptions tell it."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, int] = {}
        """Topics of the readers that wait for a whole view, first come first, with the version of the wire."""
        self.versions = {PROTOCOL_VERSION}
        """Versions in which changes are sent: the newest, and each older one that has a reader."""

    def take(self, frame: bytes) -> bool:
        """Take a subscription, or the end of one, as the socket receives it. Return whether it asks for a view."""
        topic = frame[1:]
        for version in range(OLDEST_VERSION, PROTOCOL_VERSION + 1):
            if topic == view_topic(version) and version < PROTOCOL_VERSION:
                (self.versions.add if frame[:1] == b"\x01" else self.versions.discard)(version)
            start = whole_topic(version)
            if frame[:1] == b"\x01" and topic.startswith(start) and len(topic) == len(start) + 8:
                self.waiting[topic] = version
                return True
        return False


def _members(view: ClusterView, change: ViewChange) -> tuple[InstanceInfo, ...]:
    instances = list(view.instances)
    for place in change.left:
        _set(instances, place, [])
    for instance in change.joined:
        _set(instances, _place(instance), [instance])
    return tuple(instances)


def _set(instances: list[InstanceInfo], place: Place, new: list[InstanceInfo]) -> None:
    """Put what is `new` where the instance of this role and rank is, or would be."""
    index = bisect_left(instances, place, key=_place)
    is_there = index < len(instances) and _place(instances[index]) == place
    instances[index : index + is_there] = new


def _changed(view: ClusterView, change: ViewChange, instances: tuple[InstanceInfo, ...]) -> ClusterView:
    return msgspec.structs.replace(
        view,
        version=change.version,
        instances=instances,
        cache_flush=change.cache_flush,
        weights=change.weights,
        dead=(*view.dead, *change.dead)[-KEPT_DEAD:],
        lost=(*view.lost, *change.lost)[-KEPT_LOST:],
    )
