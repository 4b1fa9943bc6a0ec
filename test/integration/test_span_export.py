"""Spans exported to a collector by OpenTelemetry's SDK: the trace they belong to, and the cost of a hanging collector.
Those of a whole cluster are in `test_metrics_cluster.py`."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from otlp_collector import Collector

from chitu.errors import ConfigError
from chitu.http.answer.spans import RequestSpan, SpanExport

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REQUEST = RequestSpan(
    "request",
    10.0,
    12.0,
    {"gen_ai.usage.output_tokens": 3},
    parts=(
        RequestSpan("prefill", 10.5, 11.0, instance="P0"),
        RequestSpan("decode", 11.0, 12.0, instance="D1", error="decode_lost"),
    ),
)


def scope(**headers: str) -> dict[str, Any]:
    return {
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


def test_a_request_is_one_trace_over_router_p_and_d_beneath_its_clients() -> None:
    before_ns = time.time_ns()
    with Collector() as collector:
        export = SpanExport(collector.url, "1.0", lambda: 13.0)  # it ended a second ago
        export.record(scope(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b"), 10.0, lambda: REQUEST)
        export.record(scope(traceparent="no such thing"), 10.0, lambda: REQUEST)
        export.record(scope(traceparent=f"00-{TRACE}-{PARENT}-00"), 10.0, lambda: REQUEST)  # not sampled by the client
        export.close()
        root, prefill, decode = sorted(collector.spans(TRACE), key=lambda span: span.start_ns)
        assert len(collector.spans()) == 6 and len({span.trace_id for span in collector.spans()}) == 2
    assert (root.service, root.parent_id, root.attributes) == (
        *("chitu-router", PARENT),
        {"gen_ai.usage.output_tokens": 3},
    )
    assert (prefill.service, prefill.instance, prefill.parent_id) == ("chitu-prefill", "P0", root.span_id)
    assert (decode.service, decode.instance, decode.parent_id) == ("chitu-decode", "D1", root.span_id)
    assert (root.is_error, decode.is_error, decode.attributes["error.type"]) == (False, True, "decode_lost")
    assert prefill.start_ns - root.start_ns == 500_000_000 and root.end_ns == decode.end_ns
    assert 0 <= root.end_ns + 1_000_000_000 - before_ns < 3600e9


def test_a_collector_that_hangs_keeps_no_request_and_no_process() -> None:
    with Collector() as collector:
        collector.hold()
        export = SpanExport(collector.url, "1.0", lambda: 13.0)
        for _ in range(3000):  # more than the SDK keeps
            export.record(scope(), 10.0, lambda: REQUEST)
        assert collector.asked.wait(60)
        export.close()  # returns while the collector holds the SDK's request
        assert not collector.spans()


def test_without_the_sdk_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint needs OpenTelemetry .*'\.\[otel\]'"):
        SpanExport("http://127.0.0.1:1", "1.0", lambda: 0.0)
