"""What an answer reports about itself, if its request asks: `return_proof` and `return_receipt`. Pure.

The proof, an object `chitu` and headers, is built from the router's record of every attempt and three moments of the
HTTP layer (`protocol/account.py`), so the stages of a choice add up to `total_s`. The receipt (`protocol/receipt.py`)
comes from the router's state of the one choice. Loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from chitu import __version__
from chitu.net.http import Headers
from chitu.protocol import KVLayout, unpack_i32
from chitu.protocol.account import Moments, RequestSnapshot, RequestState, Stages, request_stages
from chitu.protocol.receipt import Receipt, ReceiptImage, ReceiptSampling, sealed
from chitu.protocol.requests import Finish
from chitu.router.generation import Generation

PREFILL, DECODE, ATTEMPTS = b"x-chitu-prefill", b"x-chitu-decode", b"x-chitu-attempts"
CACHED_TOKENS, KV_BYTES = b"x-chitu-cached-tokens", b"x-chitu-kv-bytes"
TIMING = b"server-timing"
FAKE: Headers = [(b"x-chitu-fake", b"the instances are fake: they compute no model")]
"""Of every answer of fake instances (`chitu serve --fake`)."""
HEADERS = (PREFILL, DECODE, ATTEMPTS, CACHED_TOKENS, KV_BYTES, TIMING)


class ProofSums(msgspec.Struct, frozen=True):
    """Checksums of pages that P wrote, 16 hex digits each, layer by layer. With tensor parallelism they cover the KV
    heads of all ranks."""

    first_page: int
    """Number of the first of these pages, counted over the prompt; earlier ones were cached on D."""
    layers: int
    """Layers that have checksums of their own; 1 if each covers all layers, for a very long prompt."""
    sent: str
    """From P's memory, when it wrote them."""
    landed: str
    """From D's memory, when all had arrived. Equal to `sent` unless something was damaged."""


class ProofAttempt(msgspec.Struct, frozen=True):
    room: str
    """Room of the attempt, as in logs."""
    prefill: str | None
    """Name of P; null with a unified instance."""
    decode: str
    state: RequestState
    error: str
    """Error code if the attempt failed."""
    continued_tokens: int
    """Output tokens of earlier attempts, prefilled again after the prompt."""
    cached_tokens: int
    """Tokens of the prefill that were in cached pages."""
    kv_bytes: int | None
    """Bytes of KV and logits that P moved to D. The choices of one prompt share them; they count for the first. Null
    (not known) if D did not end the attempt itself."""
    first_token_s: float | None
    """From the attempt to its first token at the router; null if it had none."""
    page_sums: str | msgspec.UnsetType = msgspec.UNSET
    """With `return_page_sums`, of the attempt that finished: checksums of the leading full pages that it left on D, 16
    hex digits each, layer by layer."""
    transfer_sums: ProofSums | msgspec.UnsetType = msgspec.UNSET
    """With `return_page_sums`, of the attempt that finished: checksums of the pages that P wrote to D. The choices of
    one prompt share them; they are with the first."""


class ProofWeights(msgspec.Struct, frozen=True):
    first_token: int
    """Index of the first token that is of this model."""
    model_hash: str


class ProofChoice(msgspec.Struct, frozen=True):
    index: int | None
    """Index in the answer; null if `best_of` left the choice out."""
    stages: Stages
    attempts: list[ProofAttempt]
    """All attempts; the last one finished the choice."""
    weights: list[ProofWeights] = []
    """Models that its tokens are of: one, unless weights changed under it (weights.md)."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`, at the first choice of each prompt."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With `return_token_ids`: its tokens, up to the one that ended it."""


class Proof(msgspec.Struct, frozen=True):
    total_s: float
    """From the request's head to the end of its answer, at the router."""
    prefill: list[str]
    """P that finished the answer; several if choices ran on different ones. Empty with unified instances."""
    decode: list[str]
    attempts: int
    """Most attempts that a choice took."""
    cached_tokens: int
    """Cached prompt tokens, as in the usage."""
    kv_bytes: int | None
    """Bytes that P moved to D in the attempts that finished; null if not known for each of them."""
    choices: list[ProofChoice]
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET
    """With `return_receipt`: what `chitu replay` needs to generate the tokens again."""


class ChoiceTokens(NamedTuple):
    """What a choice's tokens are of, and those that its client wants to have."""

    weights: list[ProofWeights]
    prompt: list[int] | msgspec.UnsetType = msgspec.UNSET
    output: list[int] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, generation: Generation, num_tokens: int, *, has_tokens: bool, has_prompt: bool) -> ChoiceTokens:
        """`num_tokens`: as in `receipt_of`."""
        weights = [ProofWeights(*each) for each in generation.weights]
        prompt = unpack_i32(generation.request.token_ids).tolist() if has_tokens and has_prompt else msgspec.UNSET
        return cls(weights, prompt, generation.output[:num_tokens].tolist() if has_tokens else msgspec.UNSET)


class ChoiceSums(NamedTuple):
    """Checksums of the pages of one choice, from its last attempt. They are for its own client alone."""

    left: str | msgspec.UnsetType
    moved: ProofSums | msgspec.UnsetType

    @classmethod
    def of(cls, finish: Finish | None) -> ChoiceSums:
        left = finish.page_sums.hex() if finish is not None and finish.page_sums else msgspec.UNSET
        moved = finish.transfer_sums if finish is not None else None
        if moved is None:
            return cls(left, msgspec.UNSET)
        return cls(left, ProofSums(moved.first_page, moved.layers, moved.sent.hex(), moved.landed.hex()))


def proof_of(
    moments: Moments,
    records: Sequence[Sequence[RequestSnapshot]],
    indices: Iterable[int],
    cached_tokens: int,
    receipt: Receipt | None = None,
    page_sums: Sequence[ChoiceSums] = (),
    tokens: Sequence[ChoiceTokens] = (),
) -> Proof:
    """Return the proof. `records`: attempts of each choice, at least one. `indices`: the choices that are returned.
    `page_sums`, `tokens`: those of each choice; empty if none are known."""
    places: dict[int, int] = {choice: index for index, choice in enumerate(indices)}
    choices = [
        ProofChoice(
            *(places.get(i), request_stages(moments, attempts), [_attempt(record) for record in attempts]),
            *(tokens[i] if tokens else ()),
        )
        for i, attempts in enumerate(records)
    ]
    for choice, sums in zip(choices, page_sums, strict=False):
        last_one = choice.attempts[-1]
        choice.attempts[-1] = msgspec.structs.replace(last_one, page_sums=sums.left, transfer_sums=sums.moved)
    moved = [choice.attempts[-1].kv_bytes for choice in choices]
    last = [choice.attempts[-1] for choice in choices]
    return Proof(
        total_s=moments.total_s,
        prefill=list(dict.fromkeys(attempt.prefill for attempt in last if attempt.prefill is not None)),
        decode=list(dict.fromkeys(attempt.decode for attempt in last)),
        attempts=max(len(attempts) for attempts in records),
        cached_tokens=cached_tokens,
        kv_bytes=sum(count for count in moved if count is not None) if None not in moved else None,
        choices=choices,
        receipt=msgspec.UNSET if receipt is None else receipt,
    )


def headers_of(proof: Proof) -> Headers:
    """Return the proof in short. Times are of the slowest choice; for a stream, they are the times until it begins."""
    headers: Headers = [
        (DECODE, ", ".join(proof.decode).encode()),
        (ATTEMPTS, b"%d" % proof.attempts),
        (CACHED_TOKENS, b"%d" % proof.cached_tokens),
    ]
    if proof.prefill:
        headers.append((PREFILL, ", ".join(proof.prefill).encode()))
    if proof.kv_bytes is not None:
        headers.append((KV_BYTES, b"%d" % proof.kv_bytes))
    longest = min((choice.stages for choice in proof.choices), key=lambda stages: stages.span_s("answer") or 0.0)
    spans = [*longest.known(), ("total", proof.total_s)]
    return [*headers, (TIMING, ", ".join(f"{name};dur={1000 * span_s:.3f}" for name, span_s in spans).encode())]


def _attempt(record: RequestSnapshot) -> ProofAttempt:
    is_known = record.prefill is None or (record.stages is not None and record.stages.is_reported)
    return ProofAttempt(
        record.room,
        record.prefill,
        record.decode,
        record.state,
        record.error,
        record.continued_tokens,
        record.cached_tokens,
        record.kv_bytes if is_known else None,
        record.first_token_s,
    )


def receipt_of(
    model: str, layout: KVLayout, generation: Generation, num_tokens: int, images: Sequence[ReceiptImage] = ()
) -> Receipt:
    """Return the receipt. `model`: served name of the model alone. `num_tokens`: tokens of the answer; D may have
    generated more before it received the end. `images`: those of its prompt."""
    request, output = generation.request, generation.output
    reason = generation.finish.reason if generation.finish is not None else ""
    if reason not in ("stop", "length") or num_tokens < len(output):
        reason = "text"
    sampling = request.sampling
    pairs = [one.decode if one.prefill is None else f"{one.prefill}-{one.decode}" for one in generation.attempts()]
    return sealed(
        Receipt(
            receipt=1,
            chitu=__version__,
            request_id=request.request_id,
            model=request.options.adapter or model,
            model_hash=generation.weights[-1][1] if generation.weights else layout.model_hash,
            weights=[*generation.weights] if len(generation.weights) > 1 else [],
            adapter_hash=generation.adapter_hash,
            dtype=cast(Any, layout.dtype),
            served=pairs,
            revision=generation.revision,
            prompt_token_ids=unpack_i32(request.token_ids).tolist(),
            images=[*images],
            sampling=ReceiptSampling(**msgspec.structs.asdict(sampling)),
            token_ids=output[:num_tokens].tolist(),
            finish=cast(Any, reason),
        )
    )
