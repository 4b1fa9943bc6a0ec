"""The router process: `python -m chitu.serve.api_server --config FILE.yaml [--ready-file PATH] [a.b=c ...]`.

Composition root: one asyncio loop (uvloop) with the HTTP API, the bootstrap server, and the ZMQ ports for stats,
tokens, coordination and metadata sync. No policy here, and no torch. SIGTERM or SIGINT drains: no new connections or
requests, what runs may finish within `drain_s`, the rest fails, and the process ends with 0; a second signal ends the
wait.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import uvloop
import zmq

import chitu
from chitu.clock import RealClock
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import warn_of_faults
from chitu.errors import ChituError, ConfigError, NoInstance
from chitu.kv_transfer.bootstrap import BootstrapServer
from chitu.log import setup_logging
from chitu.messages import ClusterView, Heartbeat, InstanceInfo
from chitu.net.aio import BulkReader, Outbox
from chitu.net.sockets import bind
from chitu.pd_coordination import CoordinationEvents, CoordinationPorts, PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.routing import InstanceKey, make_selector
from chitu.serve.admin_routes import add_admin_routes
from chitu.serve.app import RouterApp
from chitu.serve.cluster_snapshot import SnapshotSource
from chitu.serve.cold_routes import make_cold_app
from chitu.serve.generate import GenerationRoutes
from chitu.serve.http_server import HTTPServer, listen
from chitu.serve.served_model import ServedModel
from chitu.types import Role, new_incarnation

log = logging.getLogger(__name__)

TICK_S = 0.05
GC_THRESHOLD = 20_000
"""Container objects between two young collections; a request makes some hundred that all die by counting."""


class RouterProcess:
    """Everything that the process holds. Construct, `start`, `run_until_signal`, all on the loop."""

    def __init__(self, topology: Topology, model: ServedModel, flush_log: Callable[[], None]) -> None:
        """`flush_log` is called every `TICK_S`: log lines wait so long at most."""
        self._flush_log = flush_log
        config = topology.dp_config.router
        pd = config.pd_disaggregation
        if config.workers != 1:
            raise ConfigError(f"dp_config.router.workers: {config.workers} is not supported yet; 1 is")
        self._config = config
        self._deadlines = pd.deadlines
        self._loop = asyncio.get_running_loop()
        self._clock = RealClock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox: Outbox[InstanceKey] = Outbox(self._context)
        self.router = PDRequestRouter(make_selector(config), self._outbox, self._clock, config)
        self._bootstrap = BootstrapServer(self._clock, pd.deadlines.lease_s)
        try:
            self._ports = CoordinationPorts(
                self._loop,
                self._context,
                config.host,
                (pd.coordination_port, pd.metadata_sync_port, config.stats_port),
                self.router.on_request_failed,
            )
            self._token_socket, self.token_port = bind(self._context, zmq.PULL, config.host, config.token_port)
        except zmq.ZMQError as error:
            raise ConfigError(f"dp_config.router: cannot listen on {error}") from error
        events = CoordinationEvents(
            on_joined=self.router.on_joined,
            on_lost=self._on_lost,
            on_change=self._on_view,
            on_heartbeat=self._on_heartbeat,
        )
        self.coordination = PDCoordination(self._clock, pd.deadlines, new_incarnation(), events)
        self._routes = GenerationRoutes(model, self.router, config.max_body_bytes)
        hot = {"/v1/completions": self._routes.answer_completion, "/v1/chat/completions": self._routes.answer_chat}
        self._snapshots = SnapshotSource(
            topology, model, self.router, self.coordination, self._clock, chitu.__version__
        )
        cold = make_cold_app(model, self.router, self.coordination, self._snapshots, chitu.__version__)
        add_admin_routes(cold, self.coordination, self._ports.request_drain)
        app = RouterApp(hot, cold, config.api_keys)
        self._http = HTTPServer(app, listen(config.host, config.port, "dp_config.router.port"))
        self._bootstrap_http = HTTPServer(
            self._bootstrap.app,
            listen(config.host, pd.bootstrap_port, "dp_config.router.pd_disaggregation.bootstrap_port"),
        )
        self._token_reader: BulkReader | None = None
        self._next_publish_s = 0.0
        self._signals = 0
        self._signalled = asyncio.Event()

    async def start(self) -> None:
        """Returns once every port takes connections."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._ports.start(self.coordination)
        self._token_reader = BulkReader(self._loop, self._token_socket, self.router.on_token_frames)
        self._tick()
        await self._bootstrap_http.start()
        await self._http.start()

    def port_table(self) -> dict[str, int | str]:
        """What `--ready-file` says."""
        return {
            "pid": os.getpid(),
            "host": self._config.host,
            "port": self._http.port,
            "stats_port": self._ports.stats_port,
            "token_port": self.token_port,
            "coordination_port": self._ports.coordination_port,
            "metadata_sync_port": self._ports.metadata_sync_port,
            "bootstrap_port": self._bootstrap_http.port,
        }

    async def run_until_signal(self) -> None:
        """Serve; then drain and close."""
        await self._signalled.wait()
        drain_s = self._deadlines.drain_s
        log.info("draining: %d requests run; at most %g s", self.router.in_flight, drain_s)
        self._routes.draining = True
        self._snapshots.is_closed = True
        self._http.stop_accepting()
        self._signalled.clear()
        idle = asyncio.ensure_future(self.router.idle())
        again = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({idle, again}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, again):
            task.cancel()
        if self.router.in_flight:
            log.warning("%d requests did not finish in time", self.router.in_flight)
            self.router.fail_all(NoInstance("the server is shutting down"))
        await asyncio.gather(self._http.stop(1.0), self._bootstrap_http.stop(1.0))
        if self._token_reader is not None:
            self._token_reader.close()
        self._ports.close()
        self._outbox.close()
        log.info("ended")

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()

    def _tick(self) -> None:
        """The one timer: leases, request time-outs, the view's repetition."""
        try:
            now_s = self._clock.monotonic()
            self.coordination.tick()
            self.router.tick()
            self._bootstrap.expire()
            if now_s >= self._next_publish_s:
                self._publish(self.coordination.view)
        except Exception:
            log.exception("a tick failed")
        self._flush_log()
        self._loop.call_later(TICK_S, self._tick)

    def _publish(self, view: ClusterView) -> None:
        self._next_publish_s = self._clock.monotonic() + self._deadlines.heartbeat_interval_s
        self._ports.publish(view)

    def _on_view(self, view: ClusterView) -> None:
        self.router.on_view(view)
        self._publish(view)

    def _on_lost(self, instance: InstanceInfo, reason: str) -> None:
        if instance.role is Role.PREFILL:
            self._bootstrap.forget(instance.engine_rank, instance.incarnation)
        self.router.on_lost(instance, reason)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.router.on_heartbeat(heartbeat)
        self._bootstrap.renew(heartbeat.engine_rank, heartbeat.incarnation)


def _write_atomically(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    os.replace(partial, path)


async def _serve(topology: Topology, ready_file: str | None, flush_log: Callable[[], None]) -> None:
    model = ServedModel.load(topology.model, int(time.time()))
    process = RouterProcess(topology, model, flush_log)
    await process.start()
    # What lives as long as the process is nothing for the collector to walk through again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    ports = process.port_table()
    log.info("ready: %s", " ".join(f"{name}={value}" for name, value in ports.items()))
    flush_log()
    if ready_file is not None:
        _write_atomically(Path(ready_file), msgspec.json.encode(ports))
    await process.run_until_signal()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chitu.serve.api_server", description="The router process.")
    parser.add_argument("--config", help="topology file (YAML)")
    parser.add_argument("--ready-file", help="written (JSON with the actual ports) once everything listens")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys of the topology to set")
    args = parser.parse_intermixed_args(argv)
    try:
        topology = load_topology(args.config, args.overrides)
        handler = setup_logging("router", topology.log.level, deferred=True)
        warn_of_faults(topology)
        uvloop.run(_serve(topology, args.ready_file, handler.flush))
    except ChituError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
