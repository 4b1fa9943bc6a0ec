"""A request as spans of one trace: the stages of its account on router, P and D, for an OpenTelemetry collector.

`request_span` is pure. `SpanExport` uses OpenTelemetry's SDK (`router.otlp_endpoint`; ADR 30), which is imported only
if a collector is configured. Its `OTEL_*` variables control how it samples, batches and sends, in a thread of its own.
Spans that a slow or lost collector does not accept are dropped there, at no cost to requests. Call `record` on the
loop thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from chitu.errors import ConfigError
from chitu.net.http import Scope, header
from chitu.net.threads import ServiceThread
from chitu.protocol.account import ATTEMPT_STAGES, Moments, RequestSnapshot, laid_out, request_stages

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OpenSpan
    from opentelemetry.trace import Tracer

MAX_CHOICES = 16
"""Choices that have spans of their own. Each has six or more; a request may have thousands of choices."""

Attributes = dict[str, str | int | float]
CLOSE_S = 1.0
"""Time to send the remaining spans when the process ends."""
SERVICES = {"": "chitu-router", "P": "chitu-prefill", "D": "chitu-decode", "U": "chitu-unified"}
"""`service.name`, by the first letter of an instance's name."""
CONTEXT_HEADERS = ("traceparent", "tracestate")


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
    """Return the span of a choice's last attempt, with its stages on P and D that took any time."""
    spans = [span for span in stages if span[0] in ATTEMPT_STAGES]
    parts = [
        RequestSpan(*span, _of_stage(span[0], last), _instance(span[0], last))
        for span in spans
        if span[0] != "messages" and span[1] < span[2]
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
    if stage != "decode":
        return {}
    drafts: Attributes = {}
    if record.drafts:
        drafts["chitu.drafted_tokens"] = sum([drafted for _, drafted, _ in record.drafts])
        drafts["chitu.accepted_tokens"] = sum([accepted for _, _, accepted in record.drafts])
    return {"gen_ai.usage.output_tokens": record.output_tokens, **drafts}


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


class SpanExport:
    """The exporter of one process of the router."""

    def __init__(self, endpoint: str, version: str, now_s: Callable[[], float]) -> None:
        """`endpoint`: the collector's base URL. `now_s`: the router's clock. ConfigError if the SDK is missing or
        rejects an `OTEL_*` variable."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"dp_config.router.otlp_endpoint needs OpenTelemetry ({error}): .venv/bin/pip install -e '.[otel]'"
            ) from error
        try:
            self._sender = BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))
        except ValueError as error:
            raise ConfigError(f"dp_config.router.otlp_endpoint: an OTEL_* variable is wrong: {error}") from error

        def make_tracer(instance: str) -> Tracer:
            labels = {
                "service.name": SERVICES[instance[:1]],
                "service.instance.id": instance or "router",
                "service.version": version,
            }
            provider = TracerProvider(resource=Resource.create(labels), shutdown_on_exit=False)
            provider.add_span_processor(self._sender)
            return provider.get_tracer("chitu", version)

        self._make_tracer = make_tracer
        self._router = make_tracer("")
        self._tracers = {"": self._router}
        self._now_s = now_s
        self._extract, self._within = TraceContextTextMapPropagator().extract, set_span_in_context
        self._server = SpanKind.SERVER
        self._failed: Callable[[str], Status] = lambda code: Status(StatusCode.ERROR, code)

    def record(self, scope: Scope, start_s: float, make_span: Callable[[], RequestSpan]) -> None:
        """Record a request that is over, under the trace that its client began, if any (`traceparent`). Calls
        `make_span` only if the request is sampled."""
        values = [(name, header(scope, name.encode())) for name in CONTEXT_HEADERS]
        carrier = {name: value.decode("latin-1") for name, value in values if value is not None}
        context = self._extract(carrier) if carrier else None
        # The wall clock may step at any time: read it once per request.
        zero_ns = time.time_ns() - round(1e9 * self._now_s())
        name = f"{scope['method']} {scope['path']}"
        made = self._router.start_span(name, context, self._server, start_time=_at(zero_ns, start_s))
        if made.is_recording():
            self._end(made, make_span(), zero_ns)

    def _end(self, made: OpenSpan, span: RequestSpan, zero_ns: int) -> None:
        """End a span, with its parts. They follow its sampling decision."""
        made.set_attributes(span.attributes)
        if span.error:
            made.set_attribute("error.type", span.error)
            made.set_status(self._failed(span.error))
        within = self._within(made)
        for part in span.parts:
            tracer = self._tracers.get(part.instance)
            if tracer is None:
                tracer = self._tracers[part.instance] = self._make_tracer(part.instance)
            self._end(tracer.start_span(part.name, within, start_time=_at(zero_ns, part.start_s)), part, zero_ns)
        made.end(_at(zero_ns, span.end_s))

    def close(self) -> None:
        """Send the remaining spans, if the collector accepts them within `CLOSE_S`."""

        shutdown: Callable[[], Any] = self._sender.shutdown

        def send_rest() -> None:
            with contextlib.suppress(Exception):  # an error of the SDK, about spans that are lost anyway
                shutdown()

        closing = ServiceThread("close-spans", send_rest)
        closing.start()
        closing.join(CLOSE_S)


def _at(zero_ns: int, at_s: float) -> int:
    return zero_ns + round(1e9 * at_s)
