"""The operator's calls about LoRA adapters: which ones serve, and a change of the list. Loop thread."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chitu.cluster.cluster import Cluster
from chitu.config.schema import ModelConfig
from chitu.config.topology_checks import why_no_adapter_name
from chitu.errors import InvalidRequest
from chitu.http.ask.reader import read_body
from chitu.http.fleet.bodies import AdaptersBody
from chitu.http.fleet.operator_routes import timeout_of
from chitu.http.wire.routes import Route, json_response
from chitu.protocol.admin import AdaptersState


def adapter_routes(cluster: Cluster, model: ModelConfig) -> list[Route]:
    """Return the calls. `model`: that of the topology."""

    async def get_adapters(request: Request) -> Response:
        """Return the LoRA adapters that requests may choose, and which instances lack some."""
        return json_response(cluster.adapters(model.adapters))

    async def change_adapters(request: Request) -> Response:
        """Load LoRA adapters beside the model that serves, and take others off the list. Every instance reads and
        checks them first; if one cannot, nothing is changed. Then all serve the new list at once. What runs goes on
        with the adapter that it began with, and no cache is emptied."""
        body = await read_body(request, AdaptersBody)
        _check(body, model)
        state = await cluster.change_adapters(body.load, body.unload, model.adapters, timeout_of(body.timeout_s))
        return json_response(state)

    return [
        Route("GET", "/admin/adapters", get_adapters, AdaptersState, (403,)),
        Route("POST", "/admin/adapters", change_adapters, AdaptersState, (403, 404, 409)),
    ]


def _check(body: AdaptersBody, model: ModelConfig) -> None:
    """Raise InvalidRequest for a change that none could make."""
    if not body.load and not body.unload:
        raise InvalidRequest("load and unload are both empty: there is nothing to change", "load")
    for name, path in body.load.items():
        if why := why_no_adapter_name(name, model):
            raise InvalidRequest(f"load: {why}", "load")
        if not path.startswith("/"):
            raise InvalidRequest(f"load: {path!r} is no absolute path", "load")
        if name in body.unload:
            raise InvalidRequest(f"{name!r} is in load and in unload: to replace an adapter, load it", "unload")
