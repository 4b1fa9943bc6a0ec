"""Request bodies of `/v1/embeddings`, `/v1/score` and `/v1/rerank`. Pure; see `ask/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.http.ask.bodies import CONTENT, MAX_SALT_CHARS, PROMPTS, Body, documented, note
from chitu.protocol import MAX_PRIORITY

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


class PooledBody(Body, kw_only=True):
    """What the routes that give no text have in common."""

    truncate_prompt_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=-1)] | None,
        note(
            "on routes without generation the first so many tokens of each text are computed (-1: as many as the model "
            "takes), with those that end every text; default: a longer text is an error"
        ),
    ] = None
    priority: Annotated[
        Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None, note("as of a chat")
    ] = None
    cache_salt: Annotated[Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)] | None, note("as of a chat")] = None


class EmbeddingsBody(PooledBody, kw_only=True):
    input: Annotated[
        msgspec.Raw,
        documented(anyOf=PROMPTS),
        note("text, a list of texts, a list of token ids, or a list of such lists"),
        CONTENT,
    ] = msgspec.field(default_factory=msgspec.Raw)
    """Undecoded, as `CompletionBody.prompt`."""
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        note("so many first numbers of each vector, normalised anew if the folder declares that"),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, note("`float` (default), or `base64` of float32, little endian")
    ] = None


_Texts = Annotated[str | list[str] | None, note("query: one, or one for each of `text_2`"), CONTENT]


class ScoreBody(PooledBody, kw_only=True):
    text_1: _Texts = None
    text_2: Annotated[str | list[str] | None, note("documents"), CONTENT] = None
    queries: Annotated[str | list[str] | None, note("another name of `text_1`"), CONTENT] = None
    documents: Annotated[str | list[str] | None, note("another name of `text_2`"), CONTENT] = None
    data_1: Annotated[str | list[str] | None, note("another name of `text_1`"), CONTENT] = None
    data_2: Annotated[str | list[str] | None, note("another name of `text_2`"), CONTENT] = None
    instruction: Annotated[str | None, note("task of a reranker; default: that of its chat template")] = None


class RerankBody(PooledBody, kw_only=True):
    query: str
    documents: Annotated[
        list[str | dict[str, msgspec.Raw]],
        note("up to 2048 texts, or objects with a `text`; what else an object has is returned with it"),
        CONTENT,
    ]
    top_n: Annotated[
        Annotated[int, msgspec.Meta(ge=-1)] | None, note("so many of the best; default, as with 0 and -1: all")
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None, note("only the first so many tokens of each document are read")
    ] = None
    truncation: Annotated[
        bool | None, note("true: a document that is too long with its query is cut at its end; default: an error")
    ] = None
    return_documents: Annotated[bool | None, note("false: results have no texts; default true")] = None
    instruction: Annotated[str | None, note("task of a reranker; default: that of its chat template")] = None
