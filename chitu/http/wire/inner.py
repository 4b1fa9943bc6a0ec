"""Requests that the router makes to its own routes: the lines of its batches. Loop thread.

Such a request takes the same path as a client's, from its body to its answer: an `Exchange` on a connection that keeps
what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from chitu.errors import ChituError, Internal
from chitu.http.wire.exchange import Exchange, HotRoute
from chitu.http.wire.limits import BodyBudget
from chitu.net.http import Headers, Scope


class Reply(NamedTuple):
    """What a server answered to a request."""

    status: int
    body: bytes
    request_id: str = ""
    retry_after_s: float | None = None
    may_retry: bool = True
    """False if the server says that another attempt does not help."""


class _Written:
    """What was written, in place of a socket."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def writelines(self, list_of_data: Iterable[bytes]) -> None:
        self.parts += list_of_data


class InnerPeer:
    """The connection of one such request: `Peer` of an exchange."""

    def __init__(self) -> None:
        self.is_gone = self.is_write_paused = False
        self.on_gone: Callable[[], None] | None = None
        self.transport = _Written()

    def default_headers(self) -> Headers:
        return []

    def update_reading(self) -> None:
        pass

    def note_progress(self, num_bytes: int) -> None:
        pass

    async def drained(self) -> None:
        pass

    def on_answered(self, exchange: Exchange) -> None:
        self.on_gone = None

    def leave(self) -> None:
        """End the request, as a client does by closing its connection."""
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()


async def ask(route: HotRoute, path: str, body: bytes, headers: Headers, request_id: str) -> Reply:
    """Return what a POST route answers. If the call is cancelled, the request is, too."""
    peer = InnerPeer()
    scope: Scope = {
        "type": "http",
        "http_version": "1.0",  # whose answers come without chunks
        "method": "POST",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "client": None,
        "state": {},
    }
    exchange = Exchange(peer, scope, BodyBudget(len(body)), keep_alive=False, expects_continue=False)
    exchange.errors = route.errors
    exchange.on_body(body)
    exchange.on_body_end()
    try:
        await route.answer(exchange, scope, request_id)
    except ChituError as error:
        exchange.fail(error)
    except asyncio.CancelledError:
        peer.leave()
        raise
    if not exchange.is_complete:
        exchange.fail(Internal("the server failed to handle this request"))
    return _reply_of(b"".join(peer.transport.parts), request_id)


def _reply_of(answer: bytes, request_id: str) -> Reply:
    """Return an answer that is complete, from its bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    found = dict(line.lower().split(b": ", 1) for line in lines)
    retry_after = found.get(b"retry-after")
    return Reply(
        int(first.split(b" ", 2)[1]),
        body,
        request_id,
        float(retry_after) if retry_after is not None else None,
        found.get(b"x-should-retry") != b"false",
    )
