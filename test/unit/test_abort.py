"""Who may abort a request: its tenant alone, by the request's id or the answer's."""

from __future__ import annotations

import asyncio
from typing import Any

from chitu.config.schema import RouterConfig
from chitu.http.generate import GenerationRoutes
from chitu.http.sse import ChatFormat

OWN, OTHER = {"tenant": "own"}, {"tenant": "other"}


class Waiting:
    """An exchange whose body never ends."""

    is_client_gone = False

    async def body(self, max_bytes: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    def call_when_gone(self, call: Any) -> None: ...


async def abort_while_it_runs() -> list[int]:
    routes = GenerationRoutes(*[None] * 3, RouterConfig(), lambda scope: scope["tenant"])  # type: ignore[arg-type]
    task = asyncio.ensure_future(routes.answer_chat(Waiting(), OWN, "r1"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    answer_id = ChatFormat("r1", 0, "m", False)._head["id"]
    counts = [
        routes.abort(name, scope) for name, scope in (("r1", OTHER), ("r2", OWN), (str(answer_id), OWN), ("r1", OWN))
    ]
    task.cancel()
    await asyncio.wait([task])
    return [*counts, routes.abort("r1", OWN), len(routes._running)]


def test_a_request_is_aborted_once_and_by_its_tenant_alone() -> None:
    assert asyncio.run(abort_while_it_runs()) == [0, 0, 1, 0, 0, 0]
