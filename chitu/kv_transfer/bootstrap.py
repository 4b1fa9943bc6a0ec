"""The bootstrap directory over HTTP: where each prefill instance takes registrations and TransferInfo.

Its members are the cluster view in another form: an instance is listed exactly while it is a member
(`pd_coordination.py`). P and D read the view itself (metadata sync); this server is for clients that speak HTTP. One
that knows a prefill process which is no member may list it by `PUT /route`: the directory keeps its address, and the
router sends it nothing. The router's process runs it on `bootstrap_port` (`BootstrapServer.app` is plain ASGI). If the
cluster has a key, `/route` requires its token (401); `/health` is open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec

from chitu.known_types import known
from chitu.net.curve import ClusterSecrets
from chitu.net.http import header, is_bearer
from chitu.protocol import ClusterView, InstanceInfo, RouteEntry, RouteGroup
from chitu.types import Role

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 4096
MAX_GUESTS = 256
"""Most prefill processes that are listed without being members; another one is refused."""


class Guest(msgspec.Struct, frozen=True):
    """Body of `PUT /route`, and record of a prefill process that is no member. Other keys of a body are ignored."""

    role: str
    engine_rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    rank_ip: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[0-9A-Za-z.:_%\[\]-]+\Z")]
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


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
        self._guests: dict[int, Guest] = {}
        """By engine_rank, in the order of their first `PUT`. A member hides the guest of its rank."""

    def entries(self) -> list[RouteEntry | Guest]:
        """Return an entry for each prefill instance and each guest, by engine_rank."""
        view = self._view()
        parts = [each for each in view.instances if each.group is not None]
        listed: dict[int, RouteEntry | Guest] = {**self._guests}
        listed |= {m.engine_rank: _entry(m, parts) for m in view.instances if m.role is Role.PREFILL}
        return [listed[rank] for rank in sorted(listed)]

    def handle(
        self, method: str, path: str, query: str, authorization: bytes | None = None, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Answer one HTTP request with (status, JSON body). `authorization`: value of that header, if there was one."""
        try:
            if path not in ("/health", "/route"):
                raise _RouteError(404, f"no such path: {path}")
            token = self._secrets.token.encode() if self._secrets is not None and path == "/route" else None
            if token is not None and not is_bearer(authorization, [token]):
                raise _RouteError(401, "the token of this cluster is required (made of cluster_key)")
            if method == "PUT" and path == "/route":
                return 200, self._put(body)
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

    def _put(self, body: bytes) -> bytes:
        """List a prefill process, anew if its rank was listed, and return its record. A member that says what the view
        says of it is told its record."""
        if len(body) > MAX_BODY_BYTES:
            raise _RouteError(413, f"a body of more than {MAX_BODY_BYTES} bytes")
        try:
            guest = msgspec.json.decode(body, type=known(Guest))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _RouteError(400, f"no body {{role, rank_ip, rank_port, engine_rank}}: {str(error)[:120]}") from None
        if guest.role.lower() != Role.PREFILL:
            raise _RouteError(400, f"role {guest.role[:40]!r}: the directory lists prefill instances")
        guest = msgspec.structs.replace(guest, role=Role.PREFILL.value)
        for member in self._view().instances:
            if (member.role, member.engine_rank) == (Role.PREFILL, guest.engine_rank):
                if (member.host, member.control_port) != (guest.rank_ip, guest.rank_port):
                    at = f"{member.host}:{member.control_port}"
                    raise _RouteError(409, f"{member.name} is a member of the cluster, at {at[:100]}")
                return self._get(f"engine_rank={guest.engine_rank}")
        if guest.engine_rank not in self._guests and len(self._guests) >= MAX_GUESTS:
            raise _RouteError(507, f"{MAX_GUESTS} prefill processes are listed that are no members")
        self._guests[guest.engine_rank] = guest
        return msgspec.json.encode(guest)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as an ASGI application; lifespan events are answered too. Only the body of a PUT is read."""
        if scope["type"] == "lifespan":
            while True:
                event = await receive()
                await send({"type": f"{event['type']}.complete"})
                if event["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            return
        query = scope["query_string"].decode("latin-1")
        body = await _read(receive) if scope["method"] == "PUT" else b""
        status, answer = self.handle(scope["method"], scope["path"], query, header(scope, b"authorization"), body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def _read(receive: Receive) -> bytes:
    """Return the body, or its beginning if it is too large."""
    body = b""
    while len(body) <= MAX_BODY_BYTES:
        event = await receive()
        body += event.get("body", b"")
        if event["type"] != "http.request" or not event.get("more_body", False):
            break
    return body


def _entry(member: InstanceInfo, parts: list[InstanceInfo]) -> RouteEntry:
    """Return the entry of a member. `parts`: all members that are in groups."""
    place = member.group
    group = None
    if place is not None:
        mates = [each for each in parts if each.group is not None and each.group.id == place.id]
        ranks = sorted((each.group.rank, each.engine_rank) for each in mates if each.group is not None)
        group = RouteGroup(str(place.id), place.rank, place.size, place.shares_experts, tuple(r for _, r in ranks))
    return RouteEntry(
        role=member.role,
        engine_rank=member.engine_rank,
        rank_ip=member.host,
        rank_port=member.control_port,
        tp_size=member.layout.tp_size,
        incarnation=member.incarnation,
        layout=member.layout,
        group=group,
    )
