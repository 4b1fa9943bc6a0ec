"""A request as spans of one trace: on the router, on P, on D. Pure.

Built from the same data as `proof.py`: the router's records of every attempt, with the times that P and D report, and
the moments of the HTTP layer. P and D have other clocks than the router, so their spans are placed on the router's
clock in their order of occurrence, and no longer than the span that contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from chitu.http.proof import Moments, stages_of
from chitu.protocol.snapshot import RequestSnapshot

MAX_CHOICES = 16
"""Choices that have spans of their own. Each has six or more; a request may have thousands of choices."""

Attributes = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One span. Its times are seconds on the router's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    instance: str = ""
    """Name of the instance where it happened, such as `P0`; empty for the router."""
    error: str = ""
    """Error code of `chitu.errors`; empty if there is none."""
    parts: tuple[RequestSpan, ...] = ()


def request_span(
    attributes: Attributes, moments: Moments, records: Sequence[Sequence[RequestSnapshot]], error: str
) -> RequestSpan:
    """Return the span of a request, with its parts. `records`: the attempts (at least one) of each choice that was sent
    to instances. `error`: code of the error that ended the request; if empty, the first failed choice's counts."""
    arrived_s, received_s, answered_s = moments
    received_s = min(max(received_s, arrived_s), answered_s)
    parts = [RequestSpan("receive", arrived_s, received_s)]
    if records:
        parts.append(RequestSpan("prepare", received_s, max(received_s, records[0][0].created_at_s)))
    for choice, attempts in enumerate(records[:MAX_CHOICES]):
        parts += [
            RequestSpan(
                "attempt", attempt.created_at_s, after.created_at_s, _of_attempt(choice, attempt), "", attempt.error
            )
            for attempt, after in pairwise(attempts)
        ]
        parts.append(_last_attempt(choice, moments, attempts))
    failed = [record[-1].error for record in records if record[-1].state == "failed"]
    counts: Attributes = {}
    if records:
        counts = {
            "chitu.choices": len(records),
            "chitu.attempts": max(len(attempts) for attempts in records),
            "gen_ai.usage.output_tokens": sum(attempts[-1].output_tokens for attempts in records),
        }
    return RequestSpan(
        *("request", arrived_s, answered_s),
        attributes | counts,
        error=error or next(iter(failed), ""),
        parts=tuple(parts),
    )


def _last_attempt(choice: int, moments: Moments, attempts: Sequence[RequestSnapshot]) -> RequestSpan:
    """Return the span of a choice's last attempt, with its stages. They follow one another, except the transfer: D's
    first token does not wait for it."""
    last, stages = attempts[-1], stages_of(moments, attempts)
    queue_s, compute_s = (0.0 if span is msgspec.UNSET else span for span in (stages.queue_s, stages.compute_s))
    prefill, decode = last.prefill or last.decode, last.decode
    end_s = moments.answered_s - stages.answer_s
    first_s = end_s - stages.decode_s
    computed_s = first_s - stages.first_token_s
    begun_s = computed_s - compute_s
    parts = []
    if stages.queue_s is not msgspec.UNSET:
        parts.append(RequestSpan("prefill queue", begun_s - queue_s, begun_s, instance=prefill))
        parts.append(RequestSpan("prefill", begun_s, computed_s, {"chitu.cached_tokens": last.cached_tokens}, prefill))
    if last.stages is not None and last.prefill is not None:
        landed_s = min(computed_s + last.stages.prefill.transfer_s, end_s)
        parts.append(RequestSpan("kv transfer", computed_s, landed_s, {"chitu.kv_bytes": last.kv_bytes}, prefill))
    if last.first_token_at_s is not None:
        parts.append(RequestSpan("first token", computed_s, first_s, instance=decode))
        parts.append(RequestSpan("decode", first_s, end_s, {"gen_ai.usage.output_tokens": last.output_tokens}, decode))
    start_s = begun_s - queue_s
    return RequestSpan("attempt", start_s, end_s, _of_attempt(choice, last), "", last.error, tuple(parts))


def _of_attempt(choice: int, record: RequestSnapshot) -> Attributes:
    pair = {"chitu.prefill": record.prefill} if record.prefill is not None else {}
    return {
        "chitu.choice": choice,
        "chitu.attempt": record.attempt,
        "chitu.room": record.room,
        **pair,
        "chitu.decode": record.decode,
        "chitu.state": record.state,
        "chitu.continued_tokens": record.continued_tokens,
    }
