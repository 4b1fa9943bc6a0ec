"""The bootstrap directory over HTTP: where each prefill instance takes registrations and TransferInfo.

It is the cluster view in another form and keeps nothing of its own: an instance is listed exactly while it is a member
(`pd_coordination.py`). P and D read the view itself (metadata sync); this server is for clients that speak HTTP. The
router's process runs it on `bootstrap_port` (`BootstrapServer.app` is plain ASGI). If the cluster has a key, `/route`
requires its token (401); `/health` is open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from chitu.net.curve import ClusterSecrets
from chitu.net.http import header, is_bearer
from chitu.protocol import ClusterView, RouteEntry
from chitu.types import Role

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _RouteError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BootstrapServer:
    """HTTP server of the directory. `view` returns the newest cluster view."""

    def __init__(self, view: Callable[[], ClusterView], secrets: ClusterSecrets | None = None) -> None:
        self._view = view
        self._secrets = secrets

    def entries(self) -> list[RouteEntry]:
        """Return an entry for each prefill instance, by engine_rank."""
        members = [member for member in self._view().instances if member.role is Role.PREFILL]
        return [
            RouteEntry(
                role=member.role,
                engine_rank=member.engine_rank,
                rank_ip=member.host,
                rank_port=member.control_port,
                tp_size=member.layout.tp_size,
                incarnation=member.incarnation,
                layout=member.layout,
            )
            for member in sorted(members, key=lambda member: member.engine_rank)
        ]

    def handle(self, method: str, path: str, query: str, authorization: bytes | None = None) -> tuple[int, bytes]:
        """Answer one HTTP request with (status, JSON body). `authorization`: value of that header, if there was one."""
        try:
            if path not in ("/health", "/route"):
                raise _RouteError(404, f"no such path: {path}")
            token = self._secrets.token.encode() if self._secrets is not None and path == "/route" else None
            if token is not None and not is_bearer(authorization, [token]):
                raise _RouteError(401, "the token of this cluster is required (made of cluster_key)")
            if method == "PUT" and path == "/route":
                raise _RouteError(405, "an instance registers by joining the cluster at the coordination port")
            if method != "GET":
                raise _RouteError(405, f"{method} is not allowed on {path}")
            return 200, b'{"status":"ok"}' if path == "/health" else self._get(query)
        except _RouteError as error:
            return error.status, msgspec.json.encode({"error": {"code": error.status, "message": str(error)}})

    def _get(self, query: str) -> bytes:
        values = parse_qs(query, keep_blank_values=True).get("engine_rank")
        if values is None:
            return msgspec.json.encode(self.entries())
        for entry in self.entries():
            if str(entry.engine_rank) == values[-1]:
                return msgspec.json.encode(entry)
        raise _RouteError(404, f"no prefill instance with engine_rank {values[-1][:40]!r} is in the cluster")

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as an ASGI application; lifespan events are answered too. A body is not read."""
        if scope["type"] == "lifespan":
            while True:
                event = await receive()
                await send({"type": f"{event['type']}.complete"})
                if event["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            return
        query = scope["query_string"].decode("latin-1")
        status, answer = self.handle(scope["method"], scope["path"], query, header(scope, b"authorization"))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
