"""The page at `/` and what it reads: the cluster's snapshot, once or as a stream of events, and example prompts.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. The page's files are
served unchanged from `web/`, with a policy that lets the browser load nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from chitu.assets import TINY_MODEL_NAME
from chitu.errors import TooManyRequests
from chitu.http.access import Access
from chitu.http.cluster_snapshot import SnapshotSource
from chitu.net.fair_share import NoPlace, Places

WEB_DIR = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MAX_WATCHERS = 256
"""Event streams at once; each costs the loop an encoded snapshot's write per change. One client has a quarter at most
(`Places`)."""
PAUSE_S = SnapshotSource.MIN_AGE_S + 0.002
"""Time between two looks. The loop may wake a millisecond early, when the last snapshot is not old enough yet."""
HEARTBEAT_TURNS = 5
"""Looks after which an event comes without a change, since loads change without a request too."""


class _PageFiles(StaticFiles):
    """The page's scripts and styles, under the page's policy."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def add_web_routes(app: FastAPI, source: SnapshotSource, access: Access) -> None:
    watchers = Watchers(source)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB_DIR / "index.html", media_type="text/html", headers=PAGE_HEADERS)

    app.mount("/web", _PageFiles(directory=WEB_DIR))

    @app.get("/cluster")
    async def cluster(request: Request) -> Response:
        """Return the instances with their loads, and the requests that run or ended lately: with API keys those of the
        key's tenant, with the cluster's token all."""
        snapshot = await source.fresh(access.trace_tenant(request.scope))
        return Response(snapshot, media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/cluster/events")
    async def cluster_events(request: Request) -> Response:
        """Stream the same as server-sent events: one at every change, at most ten and at least two a second."""
        client = access.client(request.scope)
        watchers.require_room(client)
        events = watchers.events(client, access.trace_tenant(request.scope))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    if source.model_name == TINY_MODEL_NAME:
        from chitu.assets.tiny_tasks import facts_for, recall

        @app.get("/demo/example")
        async def demo_example(tokens: Annotated[int, Query(ge=50, le=2000)] = 600) -> dict[str, str]:
            """Return a list of facts of about this many tokens with a question about it, and the answer, for the
            embedded model."""
            example = recall(random.Random(), facts_for(tokens))
            return {"prompt": example.prompt, "answer": example.answer, "value": example.value}


class Watchers:
    """The open event streams, shared by the clients (`Access.client`)."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._places: Places[bytes] = Places(MAX_WATCHERS)

    def require_room(self, client: bytes) -> None:
        """Raise TooManyRequests if the client has its share of the streams."""
        try:
            with self._places.place(client):
                pass
        except NoPlace:
            free = self._places.num_free
            raise TooManyRequests(f"too many event streams of one client: {free} are reserved for others") from None

    async def events(self, client: bytes, tenant: str | None) -> AsyncIterator[bytes]:
        with suppress(NoPlace), self._places.place(client):
            while not self._source.is_closed:
                encoded, shown = await self._source.shared(tenant)
                yield b"data: %b\n\n" % encoded
                for _ in range(HEARTBEAT_TURNS):
                    await asyncio.sleep(PAUSE_S)
                    if self._source.is_closed or await self._source.change(tenant) != shown:
                        break
