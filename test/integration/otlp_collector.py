"""A collector of OpenTelemetry traces: receives OTLP over HTTP and decodes it with OpenTelemetry's own protobuf
classes."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """A collector in this process, on a free port, as a context manager. `hold` keeps clients waiting for their
    answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[CollectedSpan] = []
        self._may_answer = threading.Event()
        self._may_answer.set()
        self.asked = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.asked.set()
                collector._may_answer.wait()
                assert self.path == "/v1/traces", self.path
                collector._take(data)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._may_answer.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def hold(self) -> None:
        self.asked.clear()
        self._may_answer.clear()

    def release(self) -> None:
        self._may_answer.set()

    def spans(self, trace_id: str | None = None) -> list[CollectedSpan]:
        """Return the spans of that trace; without one, all."""
        with self._lock:
            return [span for span in self._spans if trace_id in (None, span.trace_id)]

    def _take(self, data: bytes) -> None:
        taken = []
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            labels = _values(resource.resource.attributes)
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                taken.append(
                    CollectedSpan(
                        labels["service.name"],
                        labels.get("service.instance.id", ""),
                        span.name,
                        *(part.hex() for part in (span.trace_id, span.span_id, span.parent_span_id)),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _values(span.attributes),
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                )
        with self._lock:
            self._spans += taken


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
