"""What an operator tells and asks the router: `POST /admin/drain` and `/admin/cache/flush`, `GET /admin/topology`.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. Where API keys are
configured it needs one, like every other route.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Response
from pydantic import BaseModel

from chitu.config.schema import Topology
from chitu.errors import InvalidRequest
from chitu.http.cluster_source import ClusterSource
from chitu.protocol import encode


class DrainBody(BaseModel):
    instance: str
    """`P0`, `D1`, `U0`."""
    force: bool = False
    """Also where no request could be served afterwards."""


class DrainReply(BaseModel):
    instance: str
    incarnation: str
    """Decimal. Tells this process from one that takes its place."""
    status: str


class SnapshotBody(BaseModel):
    request_id: str
    """Or its answer's."""


class AbortHere(BaseModel):
    rid: str
    tenant: str


def add_admin_routes(
    app: FastAPI,
    cluster: ClusterSource,
    topology: Callable[[], Topology],
    abort: Callable[[str, str], int],
    snapshot: Callable[[str], bytes] | None,
) -> None:
    """`topology`: what an instance needs to know to join. `abort`: see `RunningAnswers`. `snapshot`: see
    `KeptRequests`; None where there is no folder of kept requests."""

    @app.post("/admin/drain")
    async def drain(body: DrainBody) -> DrainReply:
        """Send an instance nothing new. It finishes what it runs, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        draining = await cluster.drain(body.instance, body.force)
        return DrainReply(instance=draining.name, incarnation=str(draining.incarnation), status="draining")

    @app.post("/admin/cache/flush")
    async def flush_caches() -> dict[str, str]:
        """Every instance forgets the prefixes that it has cached; running requests keep what they use, and nobody
        else finds it. Told with the cluster view, which is repeated, so none misses it: within a heartbeat or so
        `pages_cached` in `GET /cluster` is 0 where nothing runs."""
        await cluster.flush_caches()
        return {"status": "flushing"}

    @app.post("/admin/snapshot")
    async def take_snapshot(body: SnapshotBody) -> Response:
        """A running request as a file, from which another router goes on (`router.kept_requests.dir`); it runs on."""
        if snapshot is None:
            raise InvalidRequest("this router has no router.kept_requests.dir, so it keeps no bodies to take up again")
        return Response(snapshot(body.request_id), media_type="application/octet-stream")

    @app.post("/admin/abort", include_in_schema=False)
    async def abort_here(body: AbortHere) -> dict[str, int]:
        """What `/abort_request` of another API process ends of this one's."""
        return {"aborted": abort(body.rid, body.tenant)}

    @app.get("/admin/record", include_in_schema=False)
    async def record() -> Response:
        """What this API process knows of its own requests, for the others (MessagePack)."""
        return Response(encode(cluster.own_report()), media_type="application/msgpack")

    @app.get("/admin/topology")
    async def topology_with_ports() -> Response:
        """The topology that runs, with the router's actual ports and without keys: `chitu join` starts an instance of
        it."""
        return Response(msgspec.json.encode(topology()), media_type="application/json")
