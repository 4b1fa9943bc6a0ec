"""Lines of text on the pair and the stage times of a request, and on its cluster. Pure.

Used by `chitu chat` below each answer and by the quickstart's first completion. The figures are the router's
(`http/cluster_snapshot.py`); nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from chitu.protocol import LoadReport
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot, RequestSnapshot, RequestState

SEPARATOR = " · "


@dataclass(frozen=True, slots=True)
class Trace:
    """One request. Spans are in seconds; None if the request did not get so far, or has no such stage."""

    pair: str
    """Instances that served it: `P0 -> D1`, or `U0`."""
    state: RequestState
    error: str
    """Error code, if it failed."""
    prompt_tokens: int
    cached_tokens: int
    """Cached tokens of the prompt, and of output that was prefilled again after it."""
    output_tokens: int
    kv_bytes: int | None
    queue_s: float | None
    """Time in P's queue until its first chunk."""
    prefill_s: float | None
    transfer_s: float | None
    """Part of the KV transfer that compute did not hide."""
    first_token_s: float | None
    """Time from the router's dispatch to token 1 at the router; `total_s` is the time to the end."""
    total_s: float | None
    tokens_per_s: float | None
    """Rate of D after token 1, on D's clock, since several tokens may arrive at the router together."""


def find_trace(snapshot: ClusterSnapshot, request_id: str) -> Trace | None:
    """Return the newest request with that X-Request-Id, or None if the router no longer has it."""
    for request in reversed(snapshot.requests):
        if request.request_id == request_id:
            return trace_of(request)
    return None


def trace_of(request: RequestSnapshot) -> Trace:
    stages = request.stages
    is_pair = request.prefill is not None
    first_s, end_s, start_s = request.first_token_at_s, request.ended_at_s, request.created_at_s
    return Trace(
        pair=f"{request.prefill} -> {request.decode}" if is_pair else request.decode,
        state=request.state,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=request.output_tokens,
        kv_bytes=request.kv_bytes if is_pair and stages is not None else None,
        queue_s=stages.prefill.queue_s if stages is not None else None,
        prefill_s=stages.prefill.compute_s if stages is not None else None,
        transfer_s=stages.prefill.transfer_s if is_pair and stages is not None else None,
        first_token_s=first_s - start_s if first_s is not None else None,
        total_s=end_s - start_s if end_s is not None else None,
        tokens_per_s=_rate(request.output_tokens - 1, stages.total_s - stages.first_token_s) if stages else None,
    )


def _rate(tokens: int, span_s: float) -> float | None:
    return tokens / span_s if tokens > 0 and span_s > 0 else None


def trace_lines(trace: Trace) -> list[str]:
    """Return two lines: where it ran and what it moved; the times of its stages."""
    run = [trace.pair, f"{trace.prompt_tokens} prompt + {trace.output_tokens} output tokens"]
    if trace.cached_tokens:
        run.append(f"{trace.cached_tokens} cached")
    if trace.kv_bytes is not None:
        run.append(f"{byte_text(trace.kv_bytes)} KV moved")
    if trace.tokens_per_s is not None:
        run.append(f"{trace.tokens_per_s:.{0 if trace.tokens_per_s >= 10 else 1}f} tokens/s")
    if trace.state != "finished":
        run.append(trace.error or trace.state)
    spans = (
        ("queue", trace.queue_s),
        ("prefill", trace.prefill_s),
        ("transfer", trace.transfer_s),
        ("first token", trace.first_token_s),
        ("total", trace.total_s),
    )
    times = [f"{name} {span_text(span_s)}" for name, span_s in spans if span_s is not None]
    return [SEPARATOR.join(part) for part in (run, times) if part]


def cluster_line(snapshot: ClusterSnapshot) -> str:
    """Return `P0 up 3 waiting 40/512 pages · D0 up idle 0/512 pages · D1 down`. Loads are of the last heartbeat."""
    return SEPARATOR.join(_instance_text(instance) for instance in snapshot.instances)


CLUSTER_COLUMNS = (
    "instance",
    "status",
    "host",
    "pid",
    "waiting",
    "transferring",
    "running",
    "pages",
    "tokens",
    "moved",
)


def cluster_rows(snapshot: ClusterSnapshot) -> list[tuple[str, ...]]:
    """Return a row of `CLUSTER_COLUMNS` for each instance."""
    rows = []
    for instance in snapshot.instances:
        row = [instance.name, instance.status, instance.host]
        load = _told_load(instance)
        if load is None:
            row += [str(instance.pid or ""), "", "", "", "", "", ""]
        else:
            row += [str(instance.pid), str(load.waiting), str(load.transferring), str(load.running)]
            row += [_pages_text(load), str(load.tokens), byte_text(load.bytes_moved)]
        rows.append(tuple(row))
    return rows


def _instance_text(instance: InstanceSnapshot) -> str:
    text = f"{instance.name} {instance.status}"
    load = _told_load(instance)
    if load is None:
        return text
    counts = (
        ("waiting", load.waiting),
        ("transferring", load.transferring),
        ("running", load.running),
        ("retracted", load.retracted),
    )
    busy = " ".join(f"{count} {name}" for name, count in counts if count)
    return f"{text} {busy or 'idle'} {_pages_text(load)} pages"


def _told_load(instance: InstanceSnapshot) -> LoadReport | None:
    """Return the load of an instance, or None before its first heartbeat."""
    return instance.load if instance.load is not None and instance.load.pages_total else None


def _pages_text(load: LoadReport) -> str:
    return f"{load.pages_total - load.pages_free - load.pages_cached}/{load.pages_total}"


def byte_text(count: int) -> str:
    """Return a number of bytes as `512 B`, `1.5 KiB`, `12.0 MiB`."""
    if count < 1024:
        return f"{count} B"
    size, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1023.95:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def span_text(span_s: float) -> str:
    """Return a span as `0.4 ms`, `14 ms`, `1.25 s`."""
    if span_s < 0.00995:
        return f"{1000 * span_s:.1f} ms"
    if span_s < 0.9995:
        return f"{1000 * span_s:.0f} ms"
    return f"{span_s:.2f} s"
