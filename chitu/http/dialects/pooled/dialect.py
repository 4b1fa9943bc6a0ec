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
            *("embeddings", EMBEDDINGS, EmbeddingsBody, read_embeddings, EmbeddingsFormat),
            reply=EmbeddingsReply,
            operation=("Embeddings", "create_embeddings"),
            is_streamed=False,
        ),
        Endpoint(
            *("score", SCORE, ScoreBody, read_score, ScoresFormat),
            reply=ScoresReply,
            operation=("Scores of pairs of texts", "create_scores"),
            is_streamed=False,
        ),
        Endpoint(
            *("rerank", RERANK, RerankBody, read_rerank, RerankFormat),
            reply=RerankReply,
            operation=("Documents in the order of their scores", "create_reranking"),
            is_streamed=False,
        ),
    ),
    unserved=UNSERVED,
)
