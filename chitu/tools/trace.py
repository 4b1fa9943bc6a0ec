"""Lines of text on the pair and the stage times of a request, and on its cluster. Pure.

Used by `chitu chat` below each answer and by the quickstart's first completion. The figures are the router's
(`http/cluster_snapshot.py`); nothing is measured here.
"""

from __future__ import annotations

from chitu.protocol import LoadReport
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot

SEPARATOR = " · "


def find_request(snapshot: ClusterSnapshot, request_id: str) -> RequestSnapshot | None:
    """Return the newest request with that X-Request-Id, or None if the router no longer has it."""
    return next((request for request in reversed(snapshot.requests) if request.request_id == request_id), None)


def trace_lines(request: RequestSnapshot) -> list[str]:
    """Return two lines: its pair and its bytes; its stages (`protocol/account.py`), the time to its first token
    and the total, from the router's dispatch."""
    stages, is_pair = request.stages, request.prefill is not None
    run = [f"{request.prefill} -> {request.decode}" if is_pair else request.decode]
    run.append(f"{request.prompt_tokens} prompt + {request.output_tokens} output tokens")
    if request.cached_tokens:
        run.append(f"{request.cached_tokens} cached")
    if stages is not None and stages.is_reported and is_pair:
        run.append(f"{byte_text(request.kv_bytes)} KV moved")
    rate = request.tokens_per_s
    if rate is not None:
        run.append(f"{rate:.{0 if rate >= 10 else 1}f} tokens/s")
    if request.state != "finished":
        run.append(request.error or request.state)
    spans = [*(stages.known() if stages is not None else ()), ("first token", request.first_token_s)]
    spans.append(("total", request.total_s))
    times = [f"{name.replace('_', ' ')} {span_text(span_s)}" for name, span_s in spans if span_s is not None]
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
