"""The half of the router that serves clients: HTTP and tokenising; and its end.

It is built over the request router and the `Cluster`. Everything runs on the loop thread. Its holder calls `tick`, and
at the end `drain` and `close`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import chitu
from chitu.clock import RealClock
from chitu.cluster.cluster import Cluster
from chitu.config.schema import Topology
from chitu.config.topology import max_body_bytes, router_at
from chitu.errors import NoInstance
from chitu.http.answer.generate import GenerationRoutes
from chitu.http.answer.kept_folder import KeptFolder
from chitu.http.answer.kept_requests import KeptRequests, KeptRoute
from chitu.http.answer.proof import HEADERS as PROOF_HEADERS
from chitu.http.answer.spans import SpanExport
from chitu.http.api_document import control_app
from chitu.http.ask.reader import BodyReader
from chitu.http.ask.served_model import ServedModel
from chitu.http.batch.batches import Batches
from chitu.http.batch.routes import batch_routes, file_routes
from chitu.http.batch.store import FileStore
from chitu.http.dialects.openai.cold import client_routes
from chitu.http.fleet.adapter_routes import adapter_routes
from chitu.http.fleet.cluster_routes import cluster_routes
from chitu.http.fleet.metric_aliases import AliasFacts
from chitu.http.fleet.operator_routes import operator_routes
from chitu.http.fleet.page import page_routes
from chitu.http.fleet.snapshot import SnapshotSource
from chitu.http.fleet.trace_routes import trace_routes
from chitu.http.table import BODIES, ENDPOINTS, HOT_ROUTES, READERS
from chitu.http.wire.access import Access
from chitu.http.wire.app import RouterApp
from chitu.net.curve import ClusterSecrets
from chitu.net.image_fetch import ImageFetcher
from chitu.pd_request_router import PDRequestRouter
from chitu.serve.body_pool import BodyProcesses

logger = logging.getLogger(__name__)

TICK_S = 0.05
GC_THRESHOLD = 20_000
"""Container objects between two young collections. A request makes a few hundred, which reference counting frees."""
SWITCH_S = 0.0005
"""Switch interval after which another thread (trace records, spans) yields the GIL to the loop."""


class Ending:
    """A request to end. The first `ask` starts the drain, the next one ends the wait for it."""

    def __init__(self) -> None:
        self.is_due = asyncio.Event()
        self.is_hurried = asyncio.Event()

    def ask(self) -> None:
        if self.is_due.is_set():
            self.is_hurried.set()
        self.is_due.set()


def keep_ticking(*ticks: Callable[[], None]) -> None:
    """Call all `ticks` now and every `TICK_S`, as long as the loop runs. A tick that fails is logged; it prevents
    neither the other ticks nor the next round, and does not end the process."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        try:
            for tick in ticks:
                try:
                    tick()
                except Exception:
                    logger.exception("a periodic task failed")
        finally:
            loop.call_later(TICK_S, run)

    run()


class ApiEndpoint:
    """The API of a router. Its holder serves `app`."""

    def __init__(
        self,
        topology: Topology,
        model: ServedModel,
        router: PDRequestRouter,
        cluster: Cluster,
        secrets: ClusterSecrets | None = None,
        index: int = 0,
    ) -> None:
        """`topology` has the actual ports of the router. `index`: that of this router in `router.hosts`."""
        config = router_at(topology.dp_config.router, index)
        self._router = router
        self._clock = clock = RealClock()
        takes_unknown = config.unknown_fields == "warn"
        self._body_processes = BodyProcesses(topology.model, takes_unknown, config.images)
        access = Access(config, secrets, clock)
        self._sees_images = model.has_vision
        fetcher = ImageFetcher(config.images, config.max_total_body_bytes)
        bodies = BodyReader(model, router, self._body_processes, takes_unknown, access.client, READERS, fetcher)
        endpoint = config.otlp_endpoint
        self._spans = SpanExport(endpoint, chitu.__version__, clock.monotonic) if endpoint else None
        spans = self._spans.record if self._spans is not None else None
        self._routes = GenerationRoutes(
            model, router, bodies, config, clock, access.cache_salt, access.require_priority, spans, ENDPOINTS
        )
        self._kept, kept_route = None, None
        if (keep := config.kept_requests).dir is not None:
            folder = KeptFolder(keep, Path(keep.dir).expanduser().absolute())
            routes, self._routes.keeps = self._routes, True
            self._kept = KeptRequests(folder, model, router, bodies, routes, access.require_kept_priority, clock)
            kept_route = KeptRoute(self._kept, routes, access.cache_salt, clock).answer
        self._batches: Batches | None = None
        if (stored := config.batches).dir is not None:
            store = FileStore(stored, Path(stored.dir).expanduser().absolute(), access.num_tenants)
            limit = max_body_bytes(config, model.has_vision)
            self._batches = Batches(
                store, self._routes.hot_routes(is_batch=True), access.credential_of, limit, self._can_serve
            )
        self._snapshots = SnapshotSource(topology, model, router, cluster, clock, chitu.__version__)
        running = self._routes.running
        rows = [
            *HOT_ROUTES,
            *client_routes(model, router, bodies, access, running, takes_unknown),
            *file_routes(self._batches, access),
            *batch_routes(self._batches, access, takes_unknown),
            *cluster_routes(
                router, cluster, self._snapshots, access, chitu.__version__, _alias_facts(topology, model, router)
            ),
            *page_routes(model.name),
            *operator_routes(cluster, topology, self._kept, access),
            *adapter_routes(cluster, topology.model),
            *trace_routes(cluster, router.trace.files.folder, access, clock),
        ]
        cold = control_app(chitu.__version__, rows, BODIES)
        hot, most = self._routes.hot_routes(), max_body_bytes(config, model.has_vision)
        self.app = RouterApp(hot, cold, access, most, config.cors_origins, kept_route, PROOF_HEADERS)
        self._next_tick_s = clock.monotonic()

    def tick(self) -> None:
        """Time out requests and keep silent streams alive. Call every `TICK_S`; how late the call comes is how long a
        token may wait here."""
        now_s = self._clock.monotonic()
        self._router.counters.loop_lag.observe(now_s - self._next_tick_s)
        self._next_tick_s = now_s + TICK_S
        self._router.tick()
        if self._kept is not None:
            self._kept.tick()
        if self._batches is not None:
            self._batches.tick()
        self._routes.tick()

    def _can_serve(self) -> bool:
        return not self._router.why_unusable()

    async def drain(self, drain_s: float, ending: Ending) -> None:
        """Write the requests that can outlive this process. Let the rest finish within `drain_s` or until `ending` is
        hurried, then fail them. New requests on open connections are rejected at once."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + drain_s
        self._routes.draining = True
        self._snapshots.is_closed = True
        if self._batches is not None:  # another process, or the next one, sends their lines again
            await self._batches.stop()
        if self._kept is not None:
            await self._kept.write_all(drain_s / 2)
        left_s = max(0.0, end_s - loop.time())
        logger.info("draining: %d requests run; at most %g s", self._router.in_flight, left_s)
        idle = asyncio.ensure_future(self._router.idle())
        again = asyncio.ensure_future(ending.is_hurried.wait())
        await asyncio.wait({idle, again}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, again):
            task.cancel()
        if self._router.in_flight or self._router.num_held:
            logger.warning("%d requests did not finish in time", self._router.in_flight + self._router.num_held)
            self._router.fail_all(NoInstance("the server is shutting down"))

    async def start(self) -> None:
        """Have ready what the first request is not to wait for."""
        if self._sees_images:
            await self._body_processes.prepare_images()

    def close(self) -> None:
        self._body_processes.close()
        if self._spans is not None:
            self._spans.close()


def freeze_gc() -> None:
    """Exclude long-lived objects from garbage collection, so that it does not walk them each time. Call once ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    sys.setswitchinterval(SWITCH_S)


def _alias_facts(topology: Topology, model: ServedModel, router: PDRequestRouter) -> Callable[[], AliasFacts] | None:
    """Return what metrics say under the names of other projects; None if they are not asked for."""
    if topology.dp_config.router.metric_aliases == "none":
        return None

    def facts() -> AliasFacts:
        model.limits(router.candidates)  # its adapters are those of the newest view
        return AliasFacts(model.name, tuple(model.adapters), topology.cache.page_size, time.time())

    return facts
