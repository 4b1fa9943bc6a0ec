"""What an operator tells the router: `POST /admin/drain`.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. Where API keys are
configured it needs one, like every other route.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from chitu.errors import LastInstance, UnknownInstance
from chitu.messages import ClusterView, InstanceInfo
from chitu.pd_coordination import PDCoordination
from chitu.routing import Candidates
from chitu.types import Role, instance_name

RequestDrain = Callable[[Role, int], bool]
"""`CoordinationPorts.request_drain`."""


class DrainBody(BaseModel):
    instance: str
    """`P0`, `D1`, `U0`."""
    force: bool = False
    """Also where no request could be served afterwards."""


class DrainReply(BaseModel):
    instance: str
    incarnation: str
    """Decimal. Who asks on can tell this process from one that takes its place."""
    status: str


def add_admin_routes(app: FastAPI, coordination: PDCoordination, request_drain: RequestDrain) -> None:
    @app.post("/admin/drain")
    async def drain(body: DrainBody) -> DrainReply:
        """Send an instance nothing new. It finishes what it runs, leaves the cluster and ends its process with 0.
        Idempotent; `GET /cluster` shows it as `draining`, then as `down`."""
        view = coordination.view
        info = _find(view, body.instance)
        if not body.force:
            _require_others(view, info)
        request_drain(info.role, info.engine_rank)
        return DrainReply(instance=_name(info), incarnation=str(info.incarnation), status="draining")


def _find(view: ClusterView, name: str) -> InstanceInfo:
    for info in view.instances:
        if _name(info) == name.upper():
            return info
    names = ", ".join(_name(info) for role in Role for info in view.instances if info.role is role) or "none"
    raise UnknownInstance(f"there is no instance {name!r} in the cluster; it has {names}")


def _require_others(view: ClusterView, info: InstanceInfo) -> None:
    """LastInstance where requests can be served now, and could not without this instance."""
    if info.draining or not Candidates.of(view).usable:
        return
    others = tuple(other for other in view.instances if other is not info)
    left = Candidates.of(msgspec.structs.replace(view, instances=others))
    if not left.usable:
        raise LastInstance(
            f"without {_name(info)} nothing could be served ({left.why_unusable()}): start another one first, "
            "or use force"
        )


def _name(info: InstanceInfo) -> str:
    return instance_name(info.role, info.engine_rank)
