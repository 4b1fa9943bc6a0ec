"""Models, tokens of texts, and aborts: the cold routes beside completions and chats. Loop thread."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chitu.http.answer.choice import RunningAnswers
from chitu.http.ask.decoder import warning_header
from chitu.http.ask.reader import BodyReader, read_body
from chitu.http.ask.served_model import ServedModel
from chitu.http.dialects.openai.bodies import (
    ABORT,
    DETOKENIZE,
    TOKENIZE,
    AbortBody,
    AbortReply,
    DetokenizeReply,
    ModelReply,
    ModelsReply,
    TokenizeReply,
)
from chitu.http.wire.access import Access
from chitu.http.wire.exchange import EXCHANGE
from chitu.http.wire.routes import JSON, Route, json_response
from chitu.pd_request_router import PDRequestRouter


def client_routes(
    model: ServedModel,
    router: PDRequestRouter,
    bodies: BodyReader,
    access: Access,
    running: RunningAnswers,
    takes_unknown: bool,
) -> list[Route]:
    """Return models, tokenising and aborts."""

    def card(adapter: str = "") -> ModelReply:
        limits = model.limits(router.candidates)
        max_model_len = limits.max_model_len if limits is not None else None
        name, path, parent = (
            (adapter, model.adapters[adapter], model.name) if adapter else (model.name, model.path, None)
        )
        return ModelReply(
            name, "model", model.created_s, "chitu", path, max_model_len, model.sampling_defaults._asdict(), parent
        )

    async def list_models(request: Request) -> Response:
        return json_response(ModelsReply("list", [card(), *map(card, model.adapters)]))

    async def get_model(request: Request) -> Response:
        model.limits(router.candidates)  # its adapters are those of the newest view
        return json_response(card(model.adapter_of(request.path_params["name"])))

    async def tokens(request: Request, route: str) -> Response:
        exchange = request.scope[EXCHANGE]
        body, warnings = await bodies.tokens(route, await request.body(), exchange)
        if warnings:
            exchange.headers.append(warning_header(warnings))
        return Response(body, media_type=JSON)

    async def tokenize(request: Request) -> Response:
        return await tokens(request, "tokenize")

    async def detokenize(request: Request) -> Response:
        return await tokens(request, "detokenize")

    async def abort_request(request: Request) -> Response:
        """End a request that this API key sent: its client gets the error `cancelled`, and P and D end it at their
        next step. An id that is unknown, or whose request has ended already, is no error."""
        body = await read_body(request, AbortBody, takes_unknown)
        tenant = access.cache_salt(request.scope)
        return json_response(AbortReply(running.abort(body.rid, tenant)))

    return [
        Route("GET", "/v1/models", list_models, ModelsReply),
        Route("GET", "/v1/models/{name:path}", get_model, ModelReply, (404,)),
        Route("POST", TOKENIZE, tokenize, TokenizeReply, (404, 429)),
        Route("POST", DETOKENIZE, detokenize, DetokenizeReply, (404, 429)),
        Route("POST", ABORT, abort_request, AbortReply),
    ]
