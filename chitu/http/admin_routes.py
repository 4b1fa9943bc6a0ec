"""An operator's calls to the router: `POST /admin/drain` and `/admin/cache/flush`, `GET /admin/topology`, and others.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. `access.py` decides which
callers may use them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from chitu.config.schema import Topology
from chitu.errors import InvalidRequest
from chitu.http.cluster_source import ClusterSource
from chitu.net.http import Scope
from chitu.protocol import encode


class DrainBody(BaseModel):
    instance: str
    """Name of the instance: `P0`, `D1`, `U0`."""
    force: bool = False
    """Drain it even if no request could be served afterwards."""


class DrainReply(BaseModel):
    instance: str
    incarnation: str
    """Incarnation in decimal. It distinguishes this process from one that takes its place."""
    status: str


class SnapshotBody(BaseModel):
    request_id: str
    """Id of the request, or of its answer."""


class AbortHere(BaseModel):
    rid: str
    tenant: str


def add_admin_routes(
    app: FastAPI,
    cluster: ClusterSource,
    topology: Callable[[], Topology],
    abort: Callable[[str, str], int],
    snapshot: Callable[[str, str | None], bytes] | None,
    tenant_of: Callable[[Scope], str | None],
) -> None:
    """Add the routes to `app`. `topology`: what an instance needs to join. `abort`: see `RunningAnswers`. `snapshot`:
    see `KeptRequests`; None if there is no folder of kept requests. `tenant_of`: the tenant whose requests a caller may
    see; None for all, as an operator with the cluster's token."""

    @app.post("/admin/drain")
    async def drain(body: DrainBody) -> DrainReply:
        """Send an instance no new requests. It finishes what it runs, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        draining = await cluster.drain(body.instance, body.force)
        return DrainReply(instance=draining.name, incarnation=str(draining.incarnation), status="draining")

    @app.post("/admin/cache/flush")
    async def flush_caches() -> dict[str, str]:
        """Make every instance forget its cached prefixes. Running requests keep the pages that they use, and no other
        request finds these. The command is part of the cluster view, which is repeated, so every instance receives it:
        within about a heartbeat `pages_cached` in `GET /cluster` is 0 if nothing runs."""
        await cluster.flush_caches()
        return {"status": "flushing"}

    @app.post("/admin/snapshot")
    async def take_snapshot(request: Request, body: SnapshotBody) -> Response:
        """Return a running request as a file from which another router can continue it (`router.kept_requests.dir`).
        The request runs on."""
        if snapshot is None:
            raise InvalidRequest("this router has no router.kept_requests.dir, so it keeps no bodies for snapshots")
        return Response(snapshot(body.request_id, tenant_of(request.scope)), media_type="application/octet-stream")

    @app.post("/admin/abort", include_in_schema=False)
    async def abort_here(body: AbortHere) -> dict[str, int]:
        """End requests of this API process on behalf of `/abort_request` of another one."""
        return {"aborted": abort(body.rid, body.tenant)}

    @app.get("/admin/record", include_in_schema=False)
    async def record() -> Response:
        """Return this API process's report on its own requests, for the other API processes (MessagePack)."""
        return Response(encode(cluster.own_report()), media_type="application/msgpack")

    @app.get("/admin/topology")
    async def topology_with_ports() -> Response:
        """Return the running topology with the router's actual ports and without keys: `chitu join` starts an instance
        of it."""
        return Response(msgspec.json.encode(topology()), media_type="application/json")
