"""The router process: `python -m chitu.serve.api_server --config FILE.yaml [a.b=c ...]`.

Composition root: one asyncio loop (uvloop) with the cluster membership and the HTTP API. It holds no policy and imports
no torch. There may be several (`router.hosts`), each complete.
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

from chitu.clock import RealClock
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import (
    API_PORT,
    listening_host,
    num_on_host,
    own_api_port,
    place_on_host,
    router_at,
    router_hosts,
    with_router,
)
from chitu.config.topology_checks import warn_of_open_api, warn_without_key
from chitu.errors import ChituError, ConfigError
from chitu.http.ask.served_model import ServedModel
from chitu.http.wire.limits import HTTPLimits
from chitu.http.wire.server import HTTPServer, Listener, listen
from chitu.log import setup_logging
from chitu.net.aio import LINGER_MS
from chitu.net.curve import derive, make_context
from chitu.net.threads import end_process
from chitu.pd_request_router import PDRequestRouter
from chitu.process.child import router_name
from chitu.process.progress import ProgressWriter
from chitu.serve.api_endpoint import TICK_S, ApiEndpoint, Ending, freeze_gc, keep_ticking
from chitu.serve.balancing import Balancing
from chitu.serve.membership import Membership, OwnCluster
from chitu.serve.other_routers import OtherRouters

logger = logging.getLogger(__name__)


class RouterProcess:
    """The router. Construct it, then call `start` and `run_until_signal`, all on the loop."""

    def __init__(self, topology: Topology, model: ServedModel, flush_log: Callable[[], None], index: int = 0) -> None:
        """`flush_log` is called with every tick, which bounds how long log lines wait. `index`: that of this router in
        `router.hosts`."""
        self._flush_log = flush_log
        self._index = index
        self._routers = routers = topology.dp_config.router
        config = router_at(routers, index)
        self._deadlines = config.pd_disaggregation.deadlines
        host = listening_host(config)
        alone: socket.socket | None = None
        if num_on_host(routers, index) > 1:
            mine = listen(host, config.port, API_PORT, is_shared=True)
            place = place_on_host(routers, index) + 1
            alone = listen(host, own_api_port(routers, index), f"{API_PORT} (+{place}, of one router alone)")
        else:
            mine = listen(host, config.port, API_PORT)
        topology = with_router(topology, port=mine.getsockname()[1])
        secrets = derive(cluster_key_of(topology))
        self._context = context = make_context(secrets)

        def cluster_of(router: PDRequestRouter) -> OwnCluster:
            self._membership = Membership(config, context, router, secrets, lambda got: self._api.on_trace(got), index)
            self._cluster = OwnCluster(router, self._membership, OtherRouters(routers, index, secrets))
            return self._cluster

        self._api = ApiEndpoint(topology, model, context, cluster_of, secrets=secrets, index=index)
        self._balancing: Balancing | None = None
        if config.balance != "off":
            cluster, core = self._cluster, self._membership.coordination
            self._balancing = Balancing(config, self._api.router, core, cluster.change_role, RealClock())
            cluster.balance = self._balancing.metrics
        self._http = HTTPServer(self._api.app, mine, limits=HTTPLimits.of(config))
        loop = asyncio.get_running_loop()
        self._alone = Listener(loop, alone, self._http.adopt) if alone is not None else None
        self._progress = ProgressWriter()
        self.ending = Ending()

    async def start(self) -> None:
        self._api.start()
        # Leases and republishing the view; request timeouts.
        ticks = [self._membership.tick, self._api.tick, self._flush_log, self._progress.beat]
        keep_ticking(*ticks, *([] if self._balancing is None else [self._balance]))
        await self._membership.start()
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
                while self._api.router.why_unusable():
                    await asyncio.sleep(TICK_S)

    def _balance(self) -> None:
        """Tick, if this is the first living router of the list: one of them changes the fleet."""
        if self._balancing is not None and self._membership.coordination.first_router == self._index:
            self._balancing.tick()

    def port_table(self) -> dict[str, int]:
        return {"port": self._http.port, "token_port": self._api.token_port, **self._membership.port_table()}

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
        await asyncio.gather(self._http.stop(1.0), self._membership.stop(1.0))
        self._api.close()
        self._context.destroy(linger=LINGER_MS)
        logger.info("ended")


async def _serve(topology: Topology, index: int, flush_log: Callable[[], None]) -> None:
    router = RouterProcess(topology, ServedModel.load(topology.model, int(time.time())), flush_log, index)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, router.ending.ask)
    await router.start()
    freeze_gc()
    ports = router.port_table()
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
