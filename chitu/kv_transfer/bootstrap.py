"""The bootstrap directory: where each prefill instance takes registrations. Server core, its HTTP face, client.

The router's process runs the server on `bootstrap_port` (`BootstrapServer.app` is plain ASGI); P puts its entry there
and renews it, D lists all of them. `BootstrapServer.register/lookup/expire` are pure values-in, values-out and belong
to the router's event loop; `BootstrapClient` blocks and belongs to a helper thread of P and D.

An entry is a lease: `expire` drops what was not renewed. Another incarnation replaces it, and the replaced one is
refused from then on (410), so a dying process cannot take its successor's place. Where the cluster has a key, `/route`
wants its token (401); `/health` is open.
"""

from __future__ import annotations

import http.client
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from chitu.clock import Clock
from chitu.errors import BootstrapTimeout, ChituError, IncompatibleLayout, TransferFailed
from chitu.net.bearer import is_bearer
from chitu.net.curve import ClusterSecrets
from chitu.net.http import header
from chitu.protocol import RouteEntry
from chitu.types import Role, instance_name

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 10

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_routes_decoder = msgspec.json.Decoder(list[RouteEntry])
_route_decoder = msgspec.json.Decoder(RouteEntry)


class RouteError(ChituError):
    """An HTTP answer other than 200."""

    code = "bootstrap"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


KEPT_REPLACED = 64
"""Of each rank."""


@dataclass(slots=True)
class _Lease:
    entry: RouteEntry
    ends_s: float
    replaced: tuple[int, ...] = ()
    """Incarnations that had the rank before, as long as it has always been somebody's."""


class BootstrapServer:
    """`lease_s`: how long an entry lives without a renewal (another `PUT` of the same entry, or `renew`)."""

    def __init__(self, clock: Clock, lease_s: float = 10.0, secrets: ClusterSecrets | None = None) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._secrets = secrets
        self._leases: dict[int, _Lease] = {}

    # ---------------------------------------------------------------------------------------------------------- core

    def register(self, entry: RouteEntry) -> None:
        """Add or renew. RouteError 400, 409 (layout differs from the other prefills') or 410 (it was replaced)."""
        if entry.role is not Role.PREFILL:
            raise RouteError(400, f"only prefill instances register here, not {entry.role.value}")
        if entry.engine_rank < 0 or not 0 < entry.rank_port <= 65535 or not entry.rank_ip or entry.tp_size < 1:
            raise RouteError(
                400,
                f"engine_rank {entry.engine_rank}, rank_ip {entry.rank_ip!r}, rank_port {entry.rank_port},"
                f" tp_size {entry.tp_size}: out of range",
            )
        if not 0 < entry.incarnation < 1 << 63:  # JSON has larger ones, the messages that name it have not
            raise RouteError(400, f"incarnation {str(entry.incarnation)[:40]}: not from 1 to {(1 << 63) - 1}")
        self.expire()
        held = self._leases.get(entry.engine_rank)
        name = instance_name(entry.role, entry.engine_rank)
        replaced = held.replaced if held is not None else ()
        if held is not None and entry.incarnation in replaced:
            text = f"{name}: incarnation {held.entry.incarnation} has taken the place of {entry.incarnation}"
            raise RouteError(410, text)
        for lease in self._leases.values():
            different = lease.entry.layout.mismatches(entry.layout)
            if different and lease.entry.engine_rank != entry.engine_rank:
                raise RouteError(
                    409,
                    f"{name}'s KV layout differs from P{lease.entry.engine_rank}'s in {'; '.join(different)}"
                    f" (P{lease.entry.engine_rank} {lease.entry.layout}, {name} {entry.layout})",
                )
        if held is not None and held.entry.incarnation != entry.incarnation:
            replaced = (*replaced, held.entry.incarnation)[-KEPT_REPLACED:]
        self._leases[entry.engine_rank] = _Lease(entry, self._clock.monotonic() + self._lease_s, replaced)

    def renew(self, engine_rank: int, incarnation: int) -> None:
        """A heartbeat of the instance came: its entry lives on. Unknown ones are ignored."""
        lease = self._leases.get(engine_rank)
        if lease is not None and lease.entry.incarnation == incarnation:
            lease.ends_s = self._clock.monotonic() + self._lease_s

    def forget(self, engine_rank: int, incarnation: int) -> None:
        """The instance left."""
        lease = self._leases.get(engine_rank)
        if lease is not None and lease.entry.incarnation == incarnation:
            del self._leases[engine_rank]

    def expire(self) -> None:
        """Drop entries whose lease ended."""
        now_s = self._clock.monotonic()
        self._leases = {rank: lease for rank, lease in self._leases.items() if lease.ends_s > now_s}

    def lookup(self, engine_rank: int) -> RouteEntry:
        """RouteError 404 where it is not registered (or not any more)."""
        self.expire()
        lease = self._leases.get(engine_rank)
        if lease is None:
            raise RouteError(404, f"no prefill instance with engine_rank {engine_rank} is registered")
        return lease.entry

    def entries(self) -> list[RouteEntry]:
        self.expire()
        return [lease.entry for _, lease in sorted(self._leases.items())]

    # ---------------------------------------------------------------------------------------------------------- HTTP

    def handle(
        self, method: str, path: str, query: str, body: bytes, authorization: bytes | None = None
    ) -> tuple[int, bytes]:
        """One HTTP request as (status, JSON body). `authorization`: that header, if there was one."""
        try:
            if path == "/health" and method == "GET":
                return 200, b'{"status":"ok"}'
            if path != "/route":
                raise RouteError(404, f"no such path: {path}")
            if self._secrets is not None and not is_bearer(authorization, [self._secrets.token.encode()]):
                raise RouteError(401, "the token of this cluster is required (made of cluster_key): it is not the same")
            if method == "PUT":
                self.register(self._decode(body))
                return 200, b'{"status":"ok"}'
            if method == "GET":
                return 200, self._get(query)
            raise RouteError(405, f"{method} is not allowed on {path}")
        except RouteError as error:
            return error.status, msgspec.json.encode({"error": {"code": error.status, "message": error.message}})

    @staticmethod
    def _decode(body: bytes) -> RouteEntry:
        try:
            return _route_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RouteError(400, f"no route entry: {error}") from error

    def _get(self, query: str) -> bytes:
        values = parse_qs(query, keep_blank_values=True).get("engine_rank")
        if values is None:
            return msgspec.json.encode(self.entries())
        try:
            engine_rank = int(values[-1])
        except ValueError as error:
            raise RouteError(400, f"engine_rank is {values[-1]!r}, not an integer") from error
        return msgspec.json.encode(self.lookup(engine_rank))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI application (`uvicorn.Config(server.app)`); lifespan events are answered too."""
        if scope["type"] == "lifespan":
            while True:
                event = await receive()
                await send({"type": f"{event['type']}.complete"})
                if event["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            return
        body = await _read_body(receive)
        if body is None:
            status, answer = 413, b'{"error":{"code":413,"message":"the body is too large"}}'
        else:
            query = scope["query_string"].decode("latin-1")
            authorization = header(scope, b"authorization")
            status, answer = self.handle(scope["method"], scope["path"], query, body, authorization)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None where it is too large."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return bytes(body)
        body += event.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not event.get("more_body", False):
            return bytes(body)


class BootstrapClient:
    """Blocking; one connection a call, each step of it bounded by `timeout_s`."""

    def __init__(self, host: str, port: int, secrets: ClusterSecrets | None = None, timeout_s: float = 2.0) -> None:
        self._host = host
        self._port = port
        self._headers = {"authorization": f"Bearer {secrets.token}"} if secrets is not None else {}
        self._timeout_s = timeout_s

    def put(self, entry: RouteEntry) -> None:
        """Register or renew. IncompatibleLayout (409), RouteError (other refusals), BootstrapTimeout (no answer)."""
        self._call("PUT", "/route", msgspec.json.encode(entry))

    def get(self, engine_rank: int) -> RouteEntry | None:
        """None where the rank is not registered."""
        try:
            return _decoded(_route_decoder, self._call("GET", f"/route?engine_rank={engine_rank}"))
        except RouteError as error:
            if error.status == 404:
                return None
            raise

    def get_all(self) -> list[RouteEntry]:
        return _decoded(_routes_decoder, self._call("GET", "/route"))

    def _call(self, method: str, target: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        headers = {**self._headers, **({"content-type": "application/json"} if body is not None else {})}
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            answer = response.read(16 << 20)
        except (OSError, http.client.HTTPException) as error:
            raise BootstrapTimeout(f"bootstrap server {self._host}:{self._port}: {error!r}") from error
        finally:
            connection.close()
        if response.status == 200:
            return answer
        message = f"{method} {target}: {response.status}: {answer[:4096].decode(errors='replace')}"
        if response.status == 409:
            raise IncompatibleLayout(message)
        raise RouteError(response.status, message)


def _decoded(decoder: msgspec.json.Decoder[T], answer: bytes) -> T:
    try:
        return decoder.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferFailed(f"unexpected answer from the bootstrap server: {error}") from error
