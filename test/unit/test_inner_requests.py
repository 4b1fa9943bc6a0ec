"""Lines of a batch on the router: the path of any request, with the lowest priority, and an end with their batch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from router_world import World, pair

from chitu.assets import TINY_MODEL_DIR
from chitu.config.schema import ModelConfig, RouterConfig
from chitu.errors import Forbidden
from chitu.http.answer.generate import GenerationRoutes
from chitu.http.ask.reader import BodyReader
from chitu.http.ask.served_model import ServedModel
from chitu.http.batch.lines import verdict_on
from chitu.http.table import ENDPOINTS, READERS
from chitu.http.wire.exchange import Exchange, HotRoute
from chitu.http.wire.inner import Reply, ask
from chitu.net.http import Scope
from chitu.protocol import MAX_PRIORITY, DecodeRequest, PrefillRequest

MODEL = ServedModel.load(ModelConfig(path=str(TINY_MODEL_DIR), served_name="m"), 0)
BODY = {"model": "m", "prompt": "abc", "max_tokens": 4}
HEADERS = [(b"authorization", b"Bearer k")]


def routes_of(world: World) -> GenerationRoutes:
    none: Any = None
    bodies = BodyReader(MODEL, world.router, none, False, lambda scope: b"", READERS)
    return GenerationRoutes(
        *(MODEL, world.router, bodies, RouterConfig(), world.clock, lambda scope: str(scope["headers"][0][1])),
        *(none, None, ENDPOINTS),
    )


async def sent(world: World, is_batch: bool = True, **more: Any) -> tuple[asyncio.Task[Reply], Any]:
    """Send a request until P has it; return its task and what P and D got."""
    route = routes_of(world).hot_routes(is_batch)["/v1/completions"]
    body = json.dumps(BODY | more).encode()
    task = asyncio.ensure_future(ask(route, "/v1/completions", body, HEADERS, "id"))
    while not (found := [each for _, each in world.outbox.sent if isinstance(each, PrefillRequest | DecodeRequest)]):
        await asyncio.sleep(0)
        assert not task.done(), task.result()
    return task, found


def test_a_line_comes_last_unless_it_has_a_priority_of_its_own() -> None:
    async def priorities(is_batch: bool, **more: Any) -> set[int]:
        task, found = await sent(pair(), is_batch, **more)
        task.cancel()
        return {each.head.options.priority for each in found}

    assert asyncio.run(priorities(True)) == {MAX_PRIORITY}
    assert asyncio.run(priorities(True, priority=3)) == {3}
    assert asyncio.run(priorities(False)) == {0}


def test_the_answer_is_that_of_the_route_and_a_line_that_is_given_up_ends_on_p_and_d() -> None:
    async def answered() -> Reply:
        world = pair()
        task, found = await sent(world)
        world.emit(found[0].head.room, 65, 66, finish="length")
        return await task

    reply = asyncio.run(answered())
    assert (reply.status, json.loads(reply.body)["usage"]["completion_tokens"]) == (200, 2)

    async def given_up() -> World:
        world = pair()
        task, _ = await sent(world)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return world

    world = asyncio.run(given_up())
    assert sorted(world.cancelled()) == ["D0", "P0"] and world.router.in_flight == 0


def test_refusals_are_answers_and_a_router_without_instances_is_asked_again() -> None:
    async def refused(body: bytes, world: World) -> Reply:
        route = routes_of(world).hot_routes(is_batch=True)["/v1/completions"]
        return await ask(route, "/v1/completions", body, HEADERS, "id")

    reply = asyncio.run(refused(b"{}", pair()))
    assert reply.status == 400 and verdict_on(reply) == "answer"
    reply = asyncio.run(refused(json.dumps(BODY).encode(), World()))
    assert reply.status == 503 and reply.retry_after_s == 1.0 and verdict_on(reply) == "busy"

    async def fails(exchange: Exchange, scope: Scope, request_id: str) -> None:
        raise Forbidden("not here")

    async def forgets(exchange: Exchange, scope: Scope, request_id: str) -> None:
        pass

    assert asyncio.run(ask(HotRoute(fails), "/v1/completions", b"{}", HEADERS, "id")).status == 403
    assert asyncio.run(ask(HotRoute(forgets), "/v1/completions", b"{}", HEADERS, "id")).status == 500
