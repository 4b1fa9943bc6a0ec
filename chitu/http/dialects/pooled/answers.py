"""Answers of `/v1/embeddings`, `/v1/score` and `/v1/rerank`, made of what P sends back of each prompt
(`protocol/requests.py:Pooled`). Pure.

Dimensions are cut off first, and the rest is normalised if the folder declares that.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from chitu.errors import Internal
from chitu.http.answer.formats import AnswerHead, FinishedChoice, UsageCount
from chitu.http.answer.proof import Proof
from chitu.http.ask.bodies import documented
from chitu.http.ask.parsed import ParsedRequest


class PooledUsageReply(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Text with `encoding_format: base64`."""


class EmbeddingsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: PooledUsageReply


class ScoreReply(msgspec.Struct):
    object: Literal["score"]
    index: int
    score: float


class ScoresReply(msgspec.Struct):
    id: str
    created: int
    model: str
    object: Literal["list"]
    data: list[ScoreReply]
    usage: PooledUsageReply


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Annotated[msgspec.Raw | msgspec.UnsetType, documented(type="object")] = msgspec.UNSET
    """The document as it was given, or an object with its `text`."""


class RerankReply(msgspec.Struct):
    id: str
    created: int
    model: str
    results: list[RerankResult]
    """The best first."""
    usage: PooledUsageReply


class PooledAnswer(msgspec.Struct, frozen=True):
    """How the answer is made of the vectors."""

    mode: str
    num_tokens: tuple[int, ...]
    """Of each prompt."""
    hidden_size: int
    normalizes: bool = False
    dimensions: int | None = None
    is_base64: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    """Of scores by embeddings: which prompts are compared."""
    is_sigmoid: bool = True
    documents: tuple[bytes, ...] = ()
    """Of a reranking: JSON of what is returned with the results; empty: nothing."""
    top_n: int | None = None


class _PooledFormat:
    """The answer of one such request, once all of its prompts are computed."""

    def __init__(self, head: AnswerHead, parsed: ParsedRequest) -> None:
        self._head = {"id": head.id, "created": head.created_s, "model": head.model}
        self._answer = cast(PooledAnswer, parsed.for_answer)

    def _scores(self, choices: Iterable[FinishedChoice]) -> list[float]:
        """Return the scores. Internal if an instance sent no vector of the model."""
        answer, data = self._answer, [choice.pooled for choice in choices]
        if answer.mode == "logits":
            return [_logit_score(raw, answer.is_sigmoid) for raw in data]
        vectors = [_vector(answer, raw, i).astype(np.float64) for i, raw in enumerate(data)]
        norms = [float(np.linalg.norm(vector)) or 1.0 for vector in vectors]
        return [float(vectors[i] @ vectors[j]) / (norms[i] * norms[j]) for i, j in answer.pairs]


class EmbeddingsFormat(_PooledFormat):
    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        answer, start = self._answer, b'{"object":"list","data":['
        for i, raw in enumerate([choice.pooled for choice in choices]):
            vector = _vector(answer, raw, i).astype("<f4")
            shown = b64encode(vector.tobytes()).decode() if answer.is_base64 else vector.tolist()
            yield start + msgspec.json.encode(EmbeddingReply("embedding", i, shown))
            start = b","
        yield b"]," + msgspec.json.encode({"model": self._head["model"], "usage": _usage(usage)})[1:]


class ScoresFormat(_PooledFormat):
    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        replies = [ScoreReply("score", i, score) for i, score in enumerate(self._scores(choices))]
        yield msgspec.json.encode({**self._head, "object": "list", "data": replies, "usage": _usage(usage)})


class RerankFormat(_PooledFormat):
    def full(self, choices: Iterable[FinishedChoice], usage: UsageCount, proof: Proof | None = None) -> Iterator[bytes]:
        answer, scores = self._answer, self._scores(choices)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: answer.top_n]
        results = [
            RerankResult(i, scores[i], msgspec.Raw(answer.documents[i]) if answer.documents else msgspec.UNSET)
            for i in order
        ]
        yield msgspec.json.encode({**self._head, "results": results, "usage": _usage(usage)})


def _usage(usage: UsageCount) -> PooledUsageReply:
    return PooledUsageReply(usage.prompt_tokens, usage.prompt_tokens)


def _vector(answer: PooledAnswer, raw: bytes, place: int) -> npt.NDArray[np.float32]:
    if not raw or len(raw) % (4 * answer.hidden_size):
        raise Internal(f"an instance sent {len(raw)} bytes of a vector of {answer.hidden_size} numbers")
    vector: npt.NDArray[np.float32] = np.frombuffer(raw, "<f4").reshape(-1, answer.hidden_size).sum(0)
    if answer.mode == "mean":
        vector = vector / np.float32(answer.num_tokens[place])
    vector = vector[: answer.dimensions]
    if answer.normalizes:
        vector = vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))
    return vector


def _logit_score(raw: bytes, is_sigmoid: bool) -> float:
    logits = np.frombuffer(raw, "<f4").astype(np.float64).tolist()
    if len(logits) not in (1, 2):
        raise Internal(f"an instance sent {len(raw)} bytes of logits of one or two tokens")
    score: float = logits[0] - (logits[1] if len(logits) == 2 else 0.0)
    if not is_sigmoid:
        return score
    return 1.0 / (1.0 + math.exp(-score)) if score >= 0 else math.exp(score) / (1.0 + math.exp(score))
