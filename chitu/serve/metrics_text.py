"""`/metrics` of the router in the Prometheus text format. Pure; loop thread."""

from __future__ import annotations

from collections.abc import Iterator

from chitu.messages import LoadReport
from chitu.pd_coordination import PDCoordination
from chitu.pd_request_router import PDRequestRouter
from chitu.types import instance_name

_LOAD_COUNTERS = ("steps", "tokens", "bytes_moved", "retractions", "unknown_frames")


def render_metrics(router: PDRequestRouter, coordination: PDCoordination) -> str:
    return "\n".join(_lines(router, coordination)) + "\n"


def _lines(router: PDRequestRouter, coordination: PDCoordination) -> Iterator[str]:
    counters = router.counters
    for name, help_text, value in (
        ("requests", "Attempts sent to a pair", counters.requests),
        ("requests_finished", "Requests that ended with stop or length", counters.finished),
        ("requests_failed", "Requests that ended with an error", counters.failed),
        ("requests_cancelled", "Requests ended by a stop string or by their client's leaving", counters.cancelled),
        ("tokens", "Tokens received from decode instances", counters.tokens),
        ("stale_tokens", "Tokens of requests that were over", counters.stale_tokens),
        ("unknown_heartbeats", "Heartbeats of incarnations that are not members", coordination.unknown_heartbeats),
    ):
        yield f"# HELP chitu_router_{name}_total {help_text}."
        yield f"# TYPE chitu_router_{name}_total counter"
        yield f"chitu_router_{name}_total {value}"
    yield "# HELP chitu_router_in_flight Requests running."
    yield "# TYPE chitu_router_in_flight gauge"
    yield f"chitu_router_in_flight {router.in_flight}"
    loads = coordination.loads()
    for name in LoadReport.__struct_fields__:
        is_counter = name in _LOAD_COUNTERS
        metric = f"chitu_instance_{name}{'_total' if is_counter else ''}"
        yield f"# TYPE {metric} {'counter' if is_counter else 'gauge'}"
        for (role, rank), load in loads.items():
            yield f'{metric}{{role="{role}",instance="{instance_name(role, rank)}"}} {getattr(load, name)}'
