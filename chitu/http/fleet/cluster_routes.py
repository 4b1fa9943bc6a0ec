"""The routes that show the cluster: health, metrics, its state and the events of it. Loop thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from chitu.cluster.cluster import Cluster
from chitu.http.fleet.metric_aliases import AliasFacts, alias_families
from chitu.http.fleet.metrics_text import MetricsReport, render_pieces
from chitu.http.fleet.replies import HealthInstance, HealthReply, StatusReply
from chitu.http.fleet.snapshot import SnapshotSource, Watchers
from chitu.http.wire.access import Access
from chitu.http.wire.pieces import in_pieces
from chitu.http.wire.routes import JSON, METRICS, NOT_STORED, STREAM, Route, json_response
from chitu.pd_request_router import PDRequestRouter
from chitu.protocol import InstanceInfo
from chitu.protocol.snapshot import ClusterSnapshot
from chitu.types import Role, instance_name, place_of


def cluster_routes(
    router: PDRequestRouter,
    cluster: Cluster,
    source: SnapshotSource,
    access: Access,
    version: str,
    alias_facts: Callable[[], AliasFacts] | None = None,
) -> list[Route]:
    """`alias_facts`: of metrics that have the names of other projects, too; None: they have not."""
    watchers = Watchers(source)

    async def livez(request: Request) -> Response:
        return json_response(StatusReply("alive"))

    async def health(request: Request) -> Response:
        """Return 200 if a request can be served now, and the router has got no signal to end. The death of one instance
        among several changes nothing."""
        record = cluster.record()
        candidates = router.candidates
        reason = "the router received a signal to end" if record.is_ending else router.why_unusable()
        answer = HealthReply(
            "ending" if record.is_ending else "unavailable" if reason else "ok",
            reason,
            record.in_flight,
            [_health_of(info) for info in cluster.view.instances],
            {str(role): any(i.role is role for i in candidates.serving) for role in Role if role is not Role.ENCODE},
        )
        return json_response(answer, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        record = cluster.record()
        aliases = partial(alias_families, alias_facts()) if alias_facts is not None else None
        report = MetricsReport(version, record.metrics, record.coordination, source.instances(), aliases)
        pieces, content_type = render_pieces(report, request.headers.get("accept", ""))
        return await in_pieces(pieces, {"content-type": content_type})

    async def snapshot(request: Request) -> Response:
        """Return the instances with their loads, and the requests that run or ended lately: with API keys those of the
        key's tenant, with the cluster's token all."""
        encoded = await source.fresh(access.trace_tenant(request.scope))
        return Response(encoded, media_type=JSON, headers=NOT_STORED)

    async def cluster_events(request: Request) -> Response:
        """Stream the same as server-sent events, one at every change, at most ten and at least two a second. After the
        first one, which has everything (`is_whole`), an event has the instances that changed since (their name and
        load alone, if nothing else did), the requests that run, and those that ended since. A load has what the page
        shows, without zeros. One with `is_whole` begins anew: an instance is gone."""
        client = access.client(request.scope)
        watchers.require_room(client)
        events = watchers.events(client, access.trace_tenant(request.scope))
        return StreamingResponse(events, media_type=STREAM, headers={**NOT_STORED, "x-accel-buffering": "no"})

    return [
        Route("GET", "/livez", livez, StatusReply),
        Route("GET", "/health", health, HealthReply),
        Route("GET", "/metrics", metrics, None, (), METRICS),
        Route(
            "GET",
            "/cluster",
            snapshot,
            ClusterSnapshot,
            more={"summary": "Cluster", "operationId": "cluster_cluster_get"},
        ),
        Route("GET", "/cluster/events", cluster_events, None, (429,), (STREAM,)),
    ]


def _health_of(info: InstanceInfo) -> HealthInstance:
    home = instance_name(*place_of(info.home)) if info.home else ""
    return HealthInstance(info.name, info.role.value, info.incarnation, info.draining, home, bool(info.weights.sleep))
