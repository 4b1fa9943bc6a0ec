"""The half of the router that keeps the cluster's membership: coordination, stats, metadata sync, bootstrap.

Owned by the process that was started as the router, on its loop thread. It reports events to a `MembershipListener`,
the request router of the same process; other API processes (`router.workers`) read them from the metadata port. It has
no part in the HTTP API or in requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zmq

from chitu.clock import Clock
from chitu.config.schema import RouterConfig
from chitu.errors import ConfigError
from chitu.http.server import HTTPServer, listen
from chitu.kv_transfer.bootstrap import BootstrapServer
from chitu.net.curve import ClusterSecrets
from chitu.pd_coordination import CoordinationEvents, PDCoordination
from chitu.protocol import ClusterView, Heartbeat, InstanceInfo, ReplicaHeartbeat, RequestFailed, TraceLines
from chitu.router.metrics import CoordinationMetrics
from chitu.serve.coordination_ports import CoordinationPorts
from chitu.types import new_incarnation


class MembershipListener(Protocol):
    """Callbacks for changes of the cluster, all immediate and on the loop thread. `PDRequestRouter` implements them."""

    def on_joined(self, instance: InstanceInfo) -> None:
        """Handle a new member. Called before the view that contains it."""

    def on_lost(self, instance: InstanceInfo, reason: str, has_died: bool) -> None:
        """Handle a lost member. Called after the view that no longer contains it. `has_died`: see
        `CoordinationEvents`."""

    def on_view(self, view: ClusterView) -> None: ...

    def on_heartbeat(self, heartbeat: Heartbeat) -> None: ...

    def on_request_failed(self, failed: RequestFailed) -> None: ...


class Membership:
    """The membership of one cluster. Binds at construction (ConfigError if that fails). Call `start`, then `tick` about
    every 50 ms."""

    def __init__(
        self,
        config: RouterConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        listener: MembershipListener,
        secrets: ClusterSecrets | None = None,
        on_replica: Callable[[ReplicaHeartbeat], None] | None = None,
        on_trace: Callable[[TraceLines], None] = lambda lines: None,
    ) -> None:
        """`on_replica`: see `CoordinationPorts`."""
        pd = config.pd_disaggregation
        self._interval_s = pd.deadlines.heartbeat_interval_s
        self._clock = clock
        self._listener = listener
        events = CoordinationEvents(
            on_joined=listener.on_joined,
            on_lost=listener.on_lost,
            on_change=self._on_view,
            on_heartbeat=listener.on_heartbeat,
        )
        self.coordination = PDCoordination(clock, pd.deadlines, new_incarnation(), events)
        try:
            self.ports = CoordinationPorts(
                self.coordination,
                context,
                config.host,
                (pd.coordination_port, pd.metadata_sync_port, config.stats_port),
                listener.on_request_failed,
                on_replica,
                on_trace,
            )
        except zmq.ZMQError as error:
            raise ConfigError(f"dp_config.router: cannot listen on {error}") from error
        self._bootstrap_http = HTTPServer(
            BootstrapServer(lambda: self.coordination.view, secrets).app,
            listen(config.host, pd.bootstrap_port, "dp_config.router.pd_disaggregation.bootstrap_port"),
        )
        self._next_publish_s = 0.0

    async def start(self) -> None:
        """Return once every port accepts connections."""
        self.ports.start()
        await self._bootstrap_http.start()

    def port_table(self) -> dict[str, int]:
        return {
            "stats_port": self.ports.stats_port,
            "coordination_port": self.ports.coordination_port,
            "metadata_sync_port": self.ports.metadata_sync_port,
            "bootstrap_port": self._bootstrap_http.port,
        }

    def tick(self) -> None:
        """Check the leases, and repeat the view when it is due."""
        self.coordination.tick()
        if self._clock.monotonic() >= self._next_publish_s:
            self._publish(self.coordination.view)

    def metrics(self) -> CoordinationMetrics:
        return self.ports.metrics()

    async def stop(self, timeout_s: float) -> None:
        await self._bootstrap_http.stop(timeout_s)
        self.ports.close()

    def _publish(self, view: ClusterView) -> None:
        self._next_publish_s = self._clock.monotonic() + self._interval_s
        self.ports.publish(view)

    def _on_view(self, view: ClusterView) -> None:
        self._listener.on_view(view)
        self._publish(view)
