"""The table of the APIs."""

from __future__ import annotations

from typing import Any

from chitu.http.ask.bodies import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE
from chitu.http.dialects.anthropic.answers import CountTokensReply, MessagesReply
from chitu.http.dialects.anthropic.bodies import COUNT_TOKENS, MESSAGES
from chitu.http.dialects.openai.answers import ChatReply, CompletionReply
from chitu.http.dialects.pooled.answers import EmbeddingsReply, RerankReply, ScoresReply
from chitu.http.dialects.responses.answers import ResponsesReply
from chitu.http.wire.routes import JSON, STREAM, Route

KEPT_REQUEST: dict[str, Any] = {
    "summary": "Answer of a request that outlived its router (`router.kept_requests.dir`), in the requested form",
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
HOT_ROUTES = (
    Route(
        *("POST", COMPLETIONS, None, CompletionReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Completion", "operationId": "create_completion"},
    ),
    Route(
        *("POST", CHAT, None, ChatReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Chat completion", "operationId": "create_chat_completion"},
    ),
    Route(
        *("POST", RESPONSES, None, ResponsesReply, (404, 429, 499, 504), (JSON, STREAM)),
        {"summary": "Response", "operationId": "create_response"},
    ),
    Route(
        *("POST", EMBEDDINGS, None, EmbeddingsReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Embeddings", "operationId": "create_embeddings"},
    ),
    Route(
        *("POST", SCORE, None, ScoresReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Scores of pairs of texts", "operationId": "create_scores"},
    ),
    Route(
        *("POST", RERANK, None, RerankReply, (404, 429, 499, 504), (JSON,)),
        {"summary": "Documents in the order of their scores", "operationId": "create_reranking"},
    ),
    Route(
        *("POST", MESSAGES, None, MessagesReply, (404, 429, 499, 504, 529), (JSON, STREAM)),
        {"summary": "Message", "operationId": "create_message"},
    ),
    Route(
        *("POST", COUNT_TOKENS, None, CountTokensReply, (404, 429, 529), (JSON,)),
        {"summary": "Tokens of a message's prompt", "operationId": "count_message_tokens"},
    ),
    Route("GET", "/v1/requests/{request_id}", None, None, (404, 499, 504), (JSON, STREAM), KEPT_REQUEST),
)
