"""The page and its files, and example prompts for the embedded model. Loop thread."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from chitu.assets import TINY_MODEL_NAME
from chitu.errors import InvalidRequest
from chitu.http.fleet.replies import ExampleReply
from chitu.http.wire.routes import Route, json_response
from chitu.net.http import query_value

WEB_DIR = Path(__file__).parent / "web"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MIN_EXAMPLE, DEFAULT_EXAMPLE, MAX_EXAMPLE = 50, 600, 2000
"""Tokens of an example prompt."""


class PageFiles(StaticFiles):
    """The page's scripts and styles, under the page's policy."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(PAGE_HEADERS)
        return response


def page_routes(model_name: str) -> list[Route]:
    """Return the page, and example prompts for the embedded model. The page's files are served unchanged from `web/`,
    with a policy that lets the browser load nothing from anywhere else."""

    async def page(request: Request) -> Response:
        return FileResponse(WEB_DIR / "index.html", media_type="text/html", headers=PAGE_HEADERS)

    routes = [Route("GET", "/", page, is_shown=False)]
    if model_name == TINY_MODEL_NAME:
        from chitu.assets.tiny_tasks import facts_for, recall

        async def demo_example(request: Request) -> Response:
            """Return a list of facts of about this many tokens with a question about it, and the answer, for the
            embedded model."""
            given = query_value(request.scope, "tokens")
            tokens = DEFAULT_EXAMPLE if given is None else int(given) if re.fullmatch(r"[0-9]{1,9}", given) else 0
            if not MIN_EXAMPLE <= tokens <= MAX_EXAMPLE:
                raise InvalidRequest(f"tokens must be from {MIN_EXAMPLE} to {MAX_EXAMPLE}", "tokens")
            example = recall(random.Random(), facts_for(tokens))
            return json_response(ExampleReply(example.prompt, example.answer, example.value))

        bounds = {"type": "integer", "minimum": MIN_EXAMPLE, "maximum": MAX_EXAMPLE, "default": DEFAULT_EXAMPLE}
        query = {"name": "tokens", "in": "query", "required": False, "schema": bounds}
        routes.append(Route("GET", "/demo/example", demo_example, ExampleReply, more={"parameters": [query]}))
    return routes
