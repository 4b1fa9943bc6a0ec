"""How an answer was served, where its request asks (`return_proof`): the object `chitu` in it, and headers. Pure.

Made of the records that the router keeps of every attempt (`RequestSnapshot`, with the times that P and D report) and
of three moments of the HTTP layer, all on the router's clock. Loop thread.

Invariant: the stages of a choice add up to `total_s`, to the microsecond: each moment ends one and begins the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from chitu.net.http import Headers
from chitu.protocol.receipt import Receipt
from chitu.protocol.requests import StageTimes
from chitu.protocol.snapshot import RequestSnapshot, RequestState

PREFILL, DECODE, ATTEMPTS = b"x-chitu-prefill", b"x-chitu-decode", b"x-chitu-attempts"
CACHED_TOKENS, KV_BYTES = b"x-chitu-cached-tokens", b"x-chitu-kv-bytes"
TIMING = b"server-timing"
HEADERS = (PREFILL, DECODE, ATTEMPTS, CACHED_TOKENS, KV_BYTES, TIMING)


class ProofStages(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a choice went: spans that follow each other, on the router. Those that are not there are not
    known, and their time is in `first_token_s`."""

    receive_s: float
    """From the request's head to the end of its body."""
    prepare_s: float
    """To its way to P and D: JSON, chat template, tokens, grammar."""
    retry_s: float
    """To the last attempt: what earlier ones took."""
    queue_s: float | msgspec.UnsetType = msgspec.UNSET
    """On P (or the unified instance), until its first chunk."""
    compute_s: float | msgspec.UnsetType = msgspec.UNSET
    """There, until the logits of the last prompt token."""
    first_token_s: float
    """To token 1 here, behind these two: the row of logits to D, sampling, messages."""
    decode_s: float
    """To the last token. The KV that token 2 needs may still be on its way at the beginning."""
    answer_s: float
    """To the end of the answer: its text, and choices that take longer."""


class ProofAttempt(msgspec.Struct, frozen=True):
    room: str
    """As logs have it."""
    prefill: str | None
    """Null on a unified instance."""
    decode: str
    state: RequestState
    error: str
    """Code, where it failed."""
    continued_tokens: int
    """Output of earlier attempts, prefilled again behind the prompt."""
    cached_tokens: int
    """Of what is prefilled, that was in cached pages."""
    kv_bytes: int | None
    """KV and logits that P moved to D. Choices of one prompt share them: the first has them. Null where D did not end
    it itself, so that they are not known."""
    stages: StageTimes | None
    """As P and D report them, each on its own clock; null likewise."""
    page_sums: str | msgspec.UnsetType = msgspec.UNSET
    """With `return_page_sums`: checksums of the leading full pages that it left on D, 16 hex digits each, layer by
    layer."""


class ProofChoice(msgspec.Struct, frozen=True):
    index: int | None
    """Null: `best_of` left it out."""
    stages: ProofStages
    attempts: list[ProofAttempt]
    """The last one finished it."""


class Proof(msgspec.Struct, frozen=True):
    total_s: float
    """From the request's head to the end of its answer, at the router."""
    prefill: list[str]
    """That finished it; more than one where choices ran apart. Empty with unified instances."""
    decode: list[str]
    attempts: int
    """The most that a choice took."""
    cached_tokens: int
    """Of the prompts, as in the usage."""
    kv_bytes: int | None
    """All that P moved to D in the attempts that finished; null where it is not known of each."""
    choices: list[ProofChoice]
    receipt: Receipt | msgspec.UnsetType = msgspec.UNSET
    """With `return_receipt`: what `chitu replay` needs to make its tokens again."""


class Moments(NamedTuple):
    """Of one request, on the router's clock."""

    arrived_s: float
    received_s: float
    answered_s: float


def proof_of(
    moments: Moments,
    records: Sequence[Sequence[RequestSnapshot]],
    indices: Iterable[int],
    cached_tokens: int,
    receipt: Receipt | None = None,
) -> Proof:
    """`records`: of each choice its attempts, with one at least. `indices`: of the choices that are returned."""
    places: dict[int, int] = {choice: index for index, choice in enumerate(indices)}
    choices = [
        ProofChoice(places.get(i), stages_of(moments, attempts), [_attempt(record) for record in attempts])
        for i, attempts in enumerate(records)
    ]
    moved = [choice.attempts[-1].kv_bytes for choice in choices]
    last = [choice.attempts[-1] for choice in choices]
    return Proof(
        total_s=_micros(moments.arrived_s, moments.answered_s) / 1e6,
        prefill=list(dict.fromkeys(attempt.prefill for attempt in last if attempt.prefill is not None)),
        decode=list(dict.fromkeys(attempt.decode for attempt in last)),
        attempts=max(len(attempts) for attempts in records),
        cached_tokens=cached_tokens,
        kv_bytes=sum(count for count in moved if count is not None) if None not in moved else None,
        choices=choices,
        receipt=msgspec.UNSET if receipt is None else receipt,
    )


def stages_of(moments: Moments, attempts: Sequence[RequestSnapshot]) -> ProofStages:
    """Of one choice. What has not happened yet ends now, which is `answered_s`."""
    last, (arrived_s, received_s, now_s) = attempts[-1], moments
    ended_s = now_s if last.ended_at_s is None else last.ended_at_s
    first_s = ended_s if last.first_token_at_s is None else last.first_token_at_s
    moments_s = (arrived_s, received_s, attempts[0].created_at_s, last.created_at_s, first_s, ended_s, now_s)
    at_us = accumulate((_micros(arrived_s, moment_s) for moment_s in moments_s), max)
    receive, prepare, retry, first, decode, answer = (after - before for before, after in pairwise(at_us))
    spans_us = {"receive_s": receive, "prepare_s": prepare, "retry_s": retry}
    if last.stages is not None:  # spans of another clock: no longer than what they are part of
        spans_us["queue_s"] = queue = min(_micros(0, last.stages.prefill.queue_s), first)
        spans_us["compute_s"] = compute = min(_micros(0, last.stages.prefill.compute_s), first - queue)
        first -= queue + compute
    spans_us |= {"first_token_s": first, "decode_s": decode, "answer_s": answer}
    return ProofStages(**{name: span_us / 1e6 for name, span_us in spans_us.items()})


def headers_of(proof: Proof) -> Headers:
    """The same in short. Times are of the choice that took longest; of a stream they are those until it begins."""
    headers: Headers = [
        (DECODE, ", ".join(proof.decode).encode()),
        (ATTEMPTS, b"%d" % proof.attempts),
        (CACHED_TOKENS, b"%d" % proof.cached_tokens),
    ]
    if proof.prefill:
        headers.append((PREFILL, ", ".join(proof.prefill).encode()))
    if proof.kv_bytes is not None:
        headers.append((KV_BYTES, b"%d" % proof.kv_bytes))
    longest = min((choice.stages for choice in proof.choices), key=lambda stages: stages.answer_s)
    spans = [*msgspec.structs.asdict(longest).items(), ("total_s", proof.total_s)]
    known = [f"{name.removesuffix('_s')};dur={1000 * span:.3f}" for name, span in spans if span is not msgspec.UNSET]
    return [*headers, (TIMING, ", ".join(known).encode())]


def _attempt(record: RequestSnapshot) -> ProofAttempt:
    is_known = record.stages is not None or record.prefill is None
    return ProofAttempt(
        record.room,
        record.prefill,
        record.decode,
        record.state,
        record.error,
        record.continued_tokens,
        record.cached_tokens,
        record.kv_bytes if is_known else None,
        record.stages,
        record.page_sums,
    )


def _micros(since_s: float, until_s: float) -> int:
    return max(0, round(1e6 * (until_s - since_s)))
