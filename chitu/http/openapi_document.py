"""The OpenAPI document: FastAPI's, plus what FastAPI cannot know. Pure; built once, on the first request for it.

The generation routes bypass FastAPI, msgspec decodes bodies, and every error is OpenAI's error object. The status codes
of a route are all that it can answer with; test_http_fuzz.py checks this.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from chitu.http.bodies import NO_EFFECT, REFUSED, SERVED
from chitu.http.body_decoder import BODIES, fields_of
from chitu.http.proof import Proof
from chitu.protocol.snapshot import ClusterSnapshot


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class CachedTokensReply(msgspec.Struct):
    cached_tokens: int


class ReasoningTokensReply(msgspec.Struct):
    reasoning_tokens: int


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokensReply
    completion_tokens_details: ReasoningTokensReply


class CompletionLogprobsReply(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprobReply(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobsReply = list[dict[str, PromptLogprobReply] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_token_ids`."""
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET
    """Present with the request field of that name."""


class CompletionReply(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    """Present with `return_proof`."""


class CalledFunctionReply(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class ChatReplyMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """Null if the message has only reasoning or calls."""
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET


class TopLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprobReply(msgspec.Struct):
    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TopLogprobReply]


class ChatLogprobsReply(msgspec.Struct):
    content: list[TokenLogprobReply]
    refusal: None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobsReply | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatReply(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsReply | msgspec.UnsetType = msgspec.UNSET


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int | None
    """Maximum tokens of a request; null while no instance serves."""
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ResponsesUsageReply(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokensReply
    output_tokens_details: ReasoningTokensReply


class ResponsesReply(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    """Items of the types reasoning, message and function_call."""
    usage: ResponsesUsageReply
    chitu: Proof | msgspec.UnsetType = msgspec.UNSET


class AbortReply(msgspec.Struct):
    aborted: int
    """Number of requests that this call ended."""


MEANINGS = {
    400: "The request is wrong; `param` names the field",
    401: "An API key, or for an operator's call the cluster's token, is missing or wrong",
    403: "Operator's calls are not accepted from this address",
    404: "There is no such model, instance, request, trace or path",
    408: "The request did not come in time",
    409: "Without this instance nothing could be served; see `force`",
    413: "The body is too large (`router.max_body_bytes`)",
    415: "The body is compressed (`Content-Encoding`)",
    429: "Too many requests, of all clients or of this one; see Retry-After",
    499: "The request was aborted (`/abort_request`)",
    431: "The headers are too large",
    500: "A bug of the server",
    503: "No instance serves, or too many wait, or the request was lost; see Retry-After",
    504: "The request took longer than `router.request_timeout_s` or X-Request-Timeout allow",
}
ANYWHERE = (400, 401, 408, 413, 415, 431, 500, 503)
"""Status codes that the server itself can return before any route runs."""
MORE: dict[str, tuple[int, ...]] = {
    "/v1/completions": (404, 429, 499, 504),
    "/v1/chat/completions": (404, 429, 499, 504),
    "/v1/responses": (404, 429, 499, 504),
    "/v1/requests/{request_id}": (404, 499, 504),
    "/v1/models/{name}": (404,),
    "/tokenize": (404, 429),
    "/detokenize": (404, 429),
    "/cluster/events": (429,),
    "/trace/{request_id}": (404,),
    "/admin/drain": (403, 404, 409),
    "/admin/cache/flush": (403,),
    "/admin/snapshot": (403, 404),
    "/admin/topology": (403,),
}
"""Further status codes, by route."""

REPLIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionReply,
    "/v1/chat/completions": ChatReply,
    "/v1/responses": ResponsesReply,
    "/tokenize": TokenizeReply,
    "/detokenize": DetokenizeReply,
    "/abort_request": AbortReply,
    "/cluster": ClusterSnapshot,
}
TEXT = {"schema": {"type": "string"}}
STREAM: dict[str, Any] = {"text/event-stream": {}}
"""Has no schema, because tools disagree on whether it would describe the whole text or one event."""
CONTENTS: dict[str, dict[str, Any]] = {
    "/v1/completions": STREAM,
    "/v1/chat/completions": STREAM,
    "/v1/responses": STREAM,
    "/v1/requests/{request_id}": {"application/json": {}, **STREAM},
    "/admin/snapshot": {"application/octet-stream": {}},
    "/metrics": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
}
"""Content types of status 200, besides JSON or instead of it, by route."""
KEPT_REQUEST: dict[str, Any] = {
    "summary": "Answer of a request that outlived its router (`router.kept_requests.dir`), as it was asked for",
    "operationId": "read_kept_request",
    "parameters": [
        {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "starting_after",
            "in": "query",
            "description": "Number of the last event that the client has; the same as the header Last-Event-ID",
            "schema": {"type": "integer", "minimum": 0},
        },
    ],
}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document. Called by `app.openapi`."""
    if app.openapi_schema is None:
        app.openapi_schema = _make(app)
    return app.openapi_schema


def _make(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: dict[str, dict[str, Any]] = document["paths"]
    paths["/v1/completions"] = {"post": {"summary": "Completion", "operationId": "create_completion"}}
    paths["/v1/chat/completions"] = {"post": {"summary": "Chat completion", "operationId": "create_chat_completion"}}
    paths["/v1/responses"] = {"post": {"summary": "Response", "operationId": "create_response"}}
    paths["/v1/requests/{request_id}"] = {"get": {**KEPT_REQUEST}}
    for path, operations in paths.items():
        for operation in operations.values():
            _complete(path, operation)
    structs = [ErrorReply, *BODIES.values(), *REPLIES.values()]
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own error, which is never sent
        schemas.pop(name, None)
    schemas.update(components)
    for path, body in BODIES.items():
        properties = schemas[body.__name__]["properties"]
        for field in fields_of(path).values():
            if "." in field.name:
                continue
            if field.effect == REFUSED:
                properties[field.name] = {"enum": [None, *field.neutral], "description": "Not supported yet"}
            elif field.effect == NO_EFFECT:
                properties.setdefault(field.name, {"description": "Without effect"})
            if field.note and field.effect != SERVED:
                properties[field.name]["description"] += f": {field.note}"
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add an operation's body, its replies, and every status code that it can return."""
    if path in BODIES:
        operation["requestBody"] = {"required": True, "content": _json(BODIES[path])}
    responses: dict[str, Any] = operation.setdefault("responses", {})
    responses.pop("422", None)
    success = responses.setdefault("200", {"description": "OK"})
    if path in REPLIES:
        success["content"] = _json(REPLIES[path])
    if path == "/cluster/events":
        success["content"] = STREAM
    else:
        success.setdefault("content", {}).update(CONTENTS.get(path, {}))
    for status in sorted({*ANYWHERE, *MORE.get(path, ())}):
        responses[str(status)] = {"description": MEANINGS[status], "content": _json(ErrorReply)}
    if path == "/health":
        # The body is the same as with 200 and gives the reason.
        responses["503"] = {
            "description": "No request can be served now, or the router is about to end",
            "content": {"application/json": {}},
        }


def _json(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct.__name__}"}}}
