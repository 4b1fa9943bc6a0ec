"""The router process: `python -m chitu.serve.api_server --config FILE.yaml [a.b=c ...]`.

Composition root: one asyncio loop (uvloop) with the request router, the cluster membership and the HTTP API, each built
from what was built before. It holds no policy and imports no torch. There may be several (`router.hosts`), each
complete.
On SIGTERM or SIGINT `/health` answers 503; after `drain_delay_s` new connections and requests are refused, running
requests may finish within `drain_s`, the rest fail, and the process exits with 0. A second signal ends both waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

import uvloop
import zmq

from chitu.clock import RealClock
from chitu.cluster.cluster import Cluster
from chitu.cluster.membership import Membership
from chitu.cluster.other_routers import OtherRouters
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.config.schema import RouterConfig, Topology
from chitu.config.topology import (
    API_PORT,
    listening_host,
    num_on_host,
    own_api_port,
    place_on_host,
    router_at,
    router_hosts,
    with_router_ports,
)
from chitu.config.topology_checks import warn_of_open_api, warn_without_key
from chitu.errors import ChituError, ConfigError
from chitu.http.ask.served_model import ServedModel
from chitu.http.wire.limits import HTTPLimits
from chitu.http.wire.server import HTTPServer, Listener, listen
from chitu.kv_transfer.bootstrap import BootstrapServer
from chitu.log import setup_logging
from chitu.net.aio import LINGER_MS, BulkReader, Outbox
from chitu.net.curve import derive, make_context
from chitu.net.sockets import bind
from chitu.net.threads import end_process
from chitu.pd_request_router import PDRequestRouter
from chitu.process.child import router_name
from chitu.process.progress import ProgressWriter
from chitu.serve.api_endpoint import TICK_S, ApiEndpoint, Ending, freeze_gc, keep_ticking
from chitu.tracing.trace_files import RouterTrace, TraceFiles, trace_folder

logger = logging.getLogger(__name__)


class RouterProcess:
    """The router. Construct it, then call `start` and `run_until_signal`, all on the loop."""

    def __init__(self, topology: Topology, model: ServedModel, flush_log: Callable[[], None], index: int = 0) -> None:
        """`flush_log` is called with every tick, which bounds how long log lines wait. `index`: that of this router in
        `router.hosts`."""
        self._flush_log = flush_log
        self._routers = routers = topology.dp_config.router
        config, clock = router_at(routers, index), RealClock()
        pd = config.pd_disaggregation
        self._deadlines = pd.deadlines
        api, alone = _listen_to_clients(config, routers, index)
        secrets = derive(cluster_key_of(topology))
        self._context = context = make_context(secrets)
        try:
            self._token_socket, token_port = bind(context, zmq.PULL, config.host, config.token_port)
        except zmq.ZMQError as error:
            raise ConfigError(f"dp_config.router: cannot listen on {error}") from error
        self._token_reader: BulkReader | None = None
        self._traces = traces = TraceFiles(trace_folder(topology.trace), topology.trace.max_mb << 20)
        trace = RouterTrace(topology.trace, traces, router_name(index), clock)
        self._router = router = PDRequestRouter(Outbox(context), clock, config, trace, index)
        self._membership = membership = Membership(config, context, router, traces, index, router.image_files.find)
        self._bootstrap = HTTPServer(
            BootstrapServer(lambda: membership.coordination.view, secrets).app,
            listen(config.host, pd.bootstrap_port, "dp_config.router.pd_disaggregation.bootstrap_port"),
        )
        self._cluster = Cluster(config, router, membership, OtherRouters(routers, index, secrets))
        inner = {"token_port": token_port, **membership.port_table(), "bootstrap_port": self._bootstrap.port}
        self.ports: dict[str, int] = {"port": api.getsockname()[1], **inner}
        # Several routers have fixed ports, which differ: an instance computes those of each.
        known = {"port": self.ports["port"]} if routers.hosts[1:] else self.ports
        topology = with_router_ports(topology, known)
        self._api = ApiEndpoint(topology, model, router, self._cluster, secrets, index)
        self._http = HTTPServer(self._api.app, api, limits=HTTPLimits.of(config))
        loop = asyncio.get_running_loop()
        self._alone = Listener(loop, alone, self._http.adopt) if alone is not None else None
        self._progress = ProgressWriter()
        self.ending = Ending()

    async def start(self) -> None:
        self._token_reader = BulkReader(asyncio.get_running_loop(), self._token_socket, self._router.on_token_frames)
        # Leases and republishing the view; request timeouts; the balancer.
        ticks = [self._membership.tick, self._api.tick, self._flush_log, self._progress.beat, self._cluster.tick]
        keep_ticking(*ticks)
        self._membership.start()
        await self._bootstrap.start()
        await self._api.start()
        if len(router_hosts(self._routers)) > 1:
            await self._meet_instances()
        await self._http.start()
        if self._alone is not None:
            self._alone.resume()

    async def _meet_instances(self) -> None:
        """Wait until requests can be served here, at most a lease: until then the other routers serve, and connections
        wait."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadlines.lease_s):
                while self._router.why_unusable():
                    await asyncio.sleep(TICK_S)

    async def run_until_signal(self) -> None:
        await self.ending.is_due.wait()
        self._cluster.is_ending = True
        if (delay_s := self._deadlines.drain_delay_s) > 0:
            logger.info("a signal to end: requests are served for %g s more, and /health answers 503", delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.is_hurried.wait(), delay_s)
        self._http.stop_accepting()
        if self._alone is not None:
            self._alone.close()
        await self._api.drain(self._deadlines.drain_s, self.ending)
        await asyncio.gather(self._http.stop(1.0), self._bootstrap.stop(1.0))
        self._membership.close()
        if self._token_reader is not None:
            self._token_reader.close()
        self._router.close()
        self._api.close()
        self._traces.close()
        self._context.destroy(linger=LINGER_MS)
        logger.info("ended")


def _listen_to_clients(
    config: RouterConfig, routers: RouterConfig, index: int
) -> tuple[socket.socket, socket.socket | None]:
    """Return the socket of the API, and if several routers of this host share its port, that of this one alone."""
    host = listening_host(config)
    if num_on_host(routers, index) == 1:
        return listen(host, config.port, API_PORT), None
    mine = listen(host, config.port, API_PORT, is_shared=True)
    place = place_on_host(routers, index) + 1
    return mine, listen(host, own_api_port(routers, index), f"{API_PORT} (+{place}, of one router alone)")


async def _serve(topology: Topology, index: int, flush_log: Callable[[], None]) -> None:
    router = RouterProcess(
        topology, ServedModel.load(topology.model, int(time.time()), topology.dp_config.router.images), flush_log, index
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, router.ending.ask)
    await router.start()
    freeze_gc()
    ports = router.ports
    facts = {"pid": os.getpid(), "host": router_hosts(topology.dp_config.router)[index], **ports}
    logger.info("ready: %s", " ".join(f"{name}={value}" for name, value in facts.items()))
    flush_log()
    ProgressWriter().ready(ports=ports)
    await router.run_until_signal()
    end_process(0)  # uvloop would wait for the threads that read and write files


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chitu.serve.api_server", description="The router process.")
    parser.add_argument("--config", help="topology file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="keys of the topology to set")
    parser.add_argument("--index", type=int, default=0, help="which of dp_config.router.hosts this is, from 0")
    args = parser.parse_intermixed_args(argv)
    try:
        topology = load_topology(args.config, args.overrides)
        if not 0 <= args.index < len(router_hosts(topology.dp_config.router)):
            raise ConfigError(f"--index {args.index}: dp_config.router.hosts has no such router")
        handler = setup_logging(
            router_name(args.index), topology.log.level, topology.log.modules, topology.log.format, deferred=True
        )
        warn_without_key(topology)
        warn_of_open_api(topology)
        uvloop.run(_serve(topology, args.index, handler.flush))
    except ChituError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
