"""Embeddings, scores and rerankings: what is made of the pooled states of prompts, without text."""

from __future__ import annotations

from chitu.http.answer.dialect import Dialect, Endpoint
from chitu.http.ask.bodies import NO_EFFECT, REFUSED
from chitu.http.ask.fields import Unserved
from chitu.http.dialects.pooled.answers import (
    EmbeddingsFormat,
    EmbeddingsReply,
    RerankFormat,
    RerankReply,
    ScoresFormat,
    ScoresReply,
)
from chitu.http.dialects.pooled.bodies import EMBEDDINGS, RERANK, SCORE, EmbeddingsBody, RerankBody, ScoreBody
from chitu.http.dialects.pooled.prompts import read_embeddings, read_rerank, read_score

UNSERVED: Unserved = (
    ((EMBEDDINGS, SCORE, RERANK), NO_EFFECT, (("user", ""), ("request_id", "use the header X-Request-Id"))),
    ((RERANK,), NO_EFFECT, (("max_chunks_per_doc", "a document is one prompt"),)),
    (
        (EMBEDDINGS, SCORE, RERANK),
        REFUSED,
        (
            ("truncation_side", "texts are cut at their end", ("right",)),
            ("mm_processor_kwargs", ""),
            ("chat_template", "the model's own is used"),
        ),
    ),
    (
        (EMBEDDINGS,),
        REFUSED,
        (
            ("instruction", "put it ahead of the text"),
            ("input_type", "put the folder's prompt ahead of the text"),
            ("prompt_name", "put the folder's prompt ahead of the text"),
            ("task", "put the folder's prompt ahead of the text"),
            ("normalize", "the folder declares it"),
            ("normalized", "the folder declares it"),
            ("use_activation", "the folder declares it"),
            ("late_chunking", "", (False,)),
            ("embedding_type", "see `encoding_format`", ("float",)),
            ("embedding_types", "see `encoding_format`", (["float"],)),
            ("output_dtype", "vectors are float32", ("float",)),
        ),
    ),
    (
        (SCORE, RERANK),
        REFUSED,
        (
            ("use_activation", "the folder declares it"),
            ("activation", "the folder declares it"),
            ("softmax", "the folder declares it"),
            ("raw_scores", "the folder declares it", (False,)),
        ),
    ),
    (
        (RERANK,),
        REFUSED,
        (
            ("rank_fields", "a document's `text` is read", (["text"],)),
            ("max_tokens_per_query", ""),
        ),
    ),
)

DIALECT = Dialect(
    endpoints=(
        Endpoint(
            name="embeddings",
            path=EMBEDDINGS,
            body=EmbeddingsBody,
            read=read_embeddings,
            answer=EmbeddingsFormat,
            reply=EmbeddingsReply,
            operation=("Embeddings", "create_embeddings"),
            is_streamed=False,
        ),
        Endpoint(
            name="score",
            path=SCORE,
            body=ScoreBody,
            read=read_score,
            answer=ScoresFormat,
            reply=ScoresReply,
            operation=("Scores of pairs of texts", "create_scores"),
            is_streamed=False,
            aliases=("/score",),
        ),
        Endpoint(
            name="rerank",
            path=RERANK,
            body=RerankBody,
            read=read_rerank,
            answer=RerankFormat,
            reply=RerankReply,
            operation=("Documents in the order of their scores", "create_reranking"),
            is_streamed=False,
            aliases=("/rerank", "/v2/rerank"),
        ),
    ),
    unserved=UNSERVED,
)
