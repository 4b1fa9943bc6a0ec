"""Embeddings, scores and rerankings: what is made of the pooled states of prompts, without text."""

from __future__ import annotations

from chitu.http.answer.dialect import Dialect, Endpoint
from chitu.http.ask.bodies import NO_EFFECT
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

UNSERVED: Unserved = (((EMBEDDINGS, SCORE, RERANK), NO_EFFECT, (("user", ""),)),)

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
        ),
    ),
    unserved=UNSERVED,
)
