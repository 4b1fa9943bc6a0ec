"""A request as spans of one trace: on the router, on P, on D. Pure.

The stages of its account (`protocol/account.py`), one after the other on the router's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from chitu.protocol.account import ATTEMPT_STAGES, Moments, RequestSnapshot, laid_out, request_stages

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
    arrived_s, _, answered_s = moments
    of_choices = [request_stages(moments, attempts) for attempts in records[:MAX_CHOICES] or [()]]
    parts = [RequestSpan(*span) for span in laid_out(of_choices[0], arrived_s) if span[0] in ("receive", "prepare")]
    for choice, attempts in enumerate(records[:MAX_CHOICES]):
        parts += [
            RequestSpan(
                "attempt", attempt.created_at_s, after.created_at_s, _of_attempt(choice, attempt), "", attempt.error
            )
            for attempt, after in pairwise(attempts)
        ]
        parts.append(_last_attempt(choice, attempts[-1], laid_out(of_choices[choice], arrived_s)))
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


def _last_attempt(choice: int, last: RequestSnapshot, stages: Iterable[tuple[str, float, float]]) -> RequestSpan:
    """Return the span of a choice's last attempt, with its stages on P and D."""
    spans = [span for span in stages if span[0] in ATTEMPT_STAGES]
    parts = [
        RequestSpan(*span, _of_stage(span[0], last), _instance(span[0], last))
        for span in spans
        if span[0] != "messages"
    ]
    return RequestSpan("attempt", spans[0][1], spans[-1][2], _of_attempt(choice, last), "", last.error, tuple(parts))


def _instance(stage: str, record: RequestSnapshot) -> str:
    """Return the name of the instance whose stage it is."""
    return (record.prefill or record.decode) if stage in ("prefill", "queue", "compute", "transfer") else record.decode


def _of_stage(stage: str, record: RequestSnapshot) -> Attributes:
    if stage in ("prefill", "compute"):
        return {"chitu.cached_tokens": record.cached_tokens}
    if stage == "transfer":
        return {"chitu.kv_bytes": record.kv_bytes}
    return {"gen_ai.usage.output_tokens": record.output_tokens} if stage == "decode" else {}


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
