"""`SimulatedRouter`: one router without sockets and HTTP: the real membership and the real request router.

It does what `Membership` and `RouterProcess` do with them: messages of instances come in by `take_*`, changes of the
view go out, and a world calls `tick`. The world is the network (`RouterWorld`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from chitu.clock import Clock
from chitu.config.schema import RouterConfig, TraceConfig
from chitu.pd_coordination import PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import (
    CoordinationReply,
    Heartbeat,
    InstanceInfo,
    MemberMessage,
    RequestFailed,
    ViewMessage,
)
from chitu.protocol.weights import PauseMode, SleepLevel
from chitu.router.candidates import InstanceKey, instance_key
from chitu.router.weights import WeightsChange
from chitu.tracing.trace_files import RouterTrace
from chitu.types import Role


class RouterWorld(Protocol):
    """What a router needs of the world that it is in."""

    @property
    def clock(self) -> Clock: ...

    @property
    def config(self) -> RouterConfig: ...

    @property
    def num_routers(self) -> int: ...

    def new_incarnation(self) -> int: ...

    def soon(self, act: Callable[[], None]) -> None:
        """Call `act` once what runs now is over."""
        ...

    def to_request_port(self, source: SimulatedRouter, target: InstanceKey, frame: bytes) -> bool:
        """Send a message to an instance. Return False if its queue is full."""
        ...

    def to_views(self, source: SimulatedRouter, message: ViewMessage) -> None:
        """Publish a change of the view to all instances that listen."""
        ...


class _Connection:
    """The router's connection to an instance (`PeerSocket`)."""

    def __init__(self, router: SimulatedRouter, key: InstanceKey) -> None:
        self._router = router
        self._key = key
        self._is_open = True

    def send(self, frame: bytes) -> bool:
        return self._is_open and self._router.world.to_request_port(self._router, self._key, frame)

    def close(self, linger_ms: int = 0) -> None:
        self._is_open = False


class SimulatedRouter:
    def __init__(self, world: RouterWorld, index: int = 0, places: Iterable[tuple[Role, int]] = ()) -> None:
        """`index`: that of this router in `router.hosts`. `places`: those of the topology."""
        self.world = world
        self.index = index
        self.incarnation = world.new_incarnation()
        self.is_frozen = False
        self._deadlines = world.config.pd_disaggregation.deadlines
        trace = RouterTrace(TraceConfig(), cast(Any, None), "router", world.clock)  # nothing is traced
        self.requests = PDRequestRouter(cast(Any, self), world.clock, world.config, trace, index)
        self.coordination = PDCoordination(
            world.clock, self._deadlines, self.incarnation, self, places, index, world.num_routers
        )
        self._change: WeightsChange | None = None
        """The last change of weights that was asked for here."""
        self._is_due = False
        self._next_beat_s = -math.inf

    def open(self, instance: InstanceInfo) -> _Connection:
        """Connect to an instance (`Outbox`)."""
        return _Connection(self, instance_key(instance))

    # ------------------------------------------------------------------------------------------------------- membership

    def on_joined(self, instance: InstanceInfo) -> None:
        self.requests.on_joined(instance)

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        self.requests.on_lost(instance, reason, has_died)

    def on_change(self) -> None:
        """Publish soon, once for any number of changes."""
        if not self._is_due:
            self._is_due = True
            self.world.soon(self.publish)

    def publish(self) -> None:
        """Publish what has changed, or repeat the number of the view; route by it from now on."""
        self._is_due = False
        core, now_s = self.coordination, self.world.clock.monotonic()
        had_change = core.has_change
        if had_change or now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._deadlines.heartbeat_interval_s
            self.world.to_views(self, core.next_change())
        view = core.routed_view
        if had_change or view.weights.holds != self.requests.is_held:
            self.requests.on_view(view)

    # ----------------------------------------------------------------------------------------------------- an operator

    def drain(self, role: Role, rank: int, *, force: bool = False) -> None:
        """Let a member finish what it has, and leave. Raises LastInstance."""
        if not force:
            self.coordination.require_others(role, rank, "chitu drain")
        self.coordination.drain(role, rank)

    def change_role(self, role: Role, rank: int, wanted: Role, *, force: bool = False) -> InstanceInfo:
        """Let a member finish what it has, or give it back, and go on in another role. Return its record. Raises
        RoleRefused, LastInstance."""
        if not force and role is not wanted:
            self.coordination.require_others(role, rank, "chitu role")
        return self.coordination.change_role(role, rank, wanted, is_revocable=not force)

    def change_weights(self, path: str, *, is_mixed: bool = False) -> WeightsChange:
        """Begin a change to the weights in a folder, and commit it once no request runs. Raises WeightsRefused."""
        self._change = self.coordination.weights.begin(path, is_mixed)
        self.coordination.publish_weights()
        return self._change

    def pause(self, mode: PauseMode) -> None:
        """Have new requests wait at all routers, and running ones end or stop; empty: let all go on."""
        self.coordination.weights.pause = mode
        self.coordination.publish_weights()

    def sleep(self, level: SleepLevel) -> None:
        """Have all instances sleep once nothing runs, until a request comes."""
        self.coordination.weights.begin_sleep(level, stays=False)
        self.coordination.publish_weights()

    def wake_for(self, num_waiting: int) -> None:
        """Wake the cluster if so many requests wait, and it sleeps."""
        if self.coordination.weights.wake_for(num_waiting + self.requests.num_awaiting):
            self.coordination.publish_weights()

    def _drive_weights(self) -> None:
        change, weights = self._change, self.coordination.weights
        if change is None or change.phase != "drain" or not self.coordination.view.weights.holds:
            return
        if weights.is_drained and not self.requests.num_sent:
            weights.on_drained(change)
            self.coordination.publish_weights()

    # --------------------------------------------------------------------------------------------------- what comes in

    def take_coordination(self, message: MemberMessage) -> CoordinationReply | None:
        """Handle a message to the coordination port, and return the reply."""
        return self.coordination.on_message(message)

    def take_stats(self, message: Heartbeat | RequestFailed) -> None:
        if isinstance(message, RequestFailed):
            self.requests.on_request_failed(message)
        elif self.coordination.on_heartbeat(message):
            self.requests.on_heartbeat(message)

    def take_tokens(self, frame: bytes) -> None:
        self.requests.on_token_frames([frame])

    def tick(self) -> None:
        """Apply deadlines and leases. Call it every 50 ms or so."""
        self.coordination.tick()
        self.requests.tick()
        self._drive_weights()
        if self.world.clock.monotonic() >= self._next_beat_s:
            self.publish()
