"""The page at `/` and what it reads: the cluster's snapshot, once or as a stream of events, and example prompts.

Part of the FastAPI application of the routes that are not hot; called on the router's loop. The page's files are
served unchanged from `web/`, with a policy that lets the browser load nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from chitu.assets import TINY_MODEL_NAME
from chitu.errors import TooManyRequests
from chitu.http.cluster_snapshot import SnapshotSource

WEB_DIR = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MAX_WATCHERS = 64
"""Event streams at once; each costs the loop an encoded snapshot's write per change."""
HEARTBEAT_TURNS = 5
"""Longest time between two events, in units of `MIN_AGE_S`, since loads change without a request too."""


class _PageFiles(StaticFiles):
    """The page's scripts and styles, under the page's policy."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def add_web_routes(app: FastAPI, source: SnapshotSource) -> None:
    watchers = Watchers(source)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(WEB_DIR / "index.html", media_type="text/html", headers=PAGE_HEADERS)

    app.mount("/web", _PageFiles(directory=WEB_DIR))

    @app.get("/cluster")
    async def cluster() -> Response:
        """Return the instances with their loads, and the requests that run or ended lately."""
        return Response(await source.fresh(), media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/cluster/events")
    async def cluster_events(request: Request) -> Response:
        """Stream the same as server-sent events: one at every change, at most ten and at least two a second."""
        watchers.require_room()
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(watchers.events(), media_type="text/event-stream", headers=headers)

    if source.model_name == TINY_MODEL_NAME:
        from chitu.workloads import tiny

        @app.get("/demo/example")
        async def demo_example(tokens: Annotated[int, Query(ge=50, le=2000)] = 600) -> dict[str, str]:
            """Return a list of facts of about this many tokens with a question about it, and the answer, for the
            embedded model."""
            example = tiny.recall(random.Random(), tiny.facts_for(tokens))
            return {"prompt": example.prompt, "answer": example.answer, "value": example.value}


class Watchers:
    """The open event streams."""

    def __init__(self, source: SnapshotSource) -> None:
        self._source = source
        self._count = 0

    def require_room(self) -> None:
        if self._count >= MAX_WATCHERS:
            raise TooManyRequests(f"{self._count} clients watch the cluster already")

    async def events(self) -> AsyncIterator[bytes]:
        self._count += 1
        try:
            while not self._source.is_closed:
                encoded, shown = await self._source.shared()
                yield b"data: %b\n\n" % encoded
                for _ in range(HEARTBEAT_TURNS):
                    await asyncio.sleep(SnapshotSource.MIN_AGE_S)
                    if self._source.is_closed or await self._source.change() != shown:
                        break
        finally:
            self._count -= 1
