"""`chitu trace ID`: the timeline of a traced request, from a running cluster or the folder of its records; and the
lines on a request's pair and stage times below each answer of `chitu chat`. The figures are the router's; nothing is
measured here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chitu.errors import ConfigError, UnknownTrace
from chitu.launch.router_client import RouterClient
from chitu.protocol import LoadReport
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.protocol.trace import AnyTraceRecord, TraceEnd, TraceFrame, TraceRequest, TraceSent
from chitu.tracing.timeline import Timeline, TraceAnswer, answer_of, drafts_text
from chitu.tracing.trace_files import find_records

SEPARATOR = " · "
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
PATIENCE_S = 2.0
"""Time to wait for the records of instances, which are usually written within 0.1 s."""
POLL_S = 0.1
BAR_WIDTH = 32
MAX_SHOWN_BYTES = 24
"""Bytes shown of a binary field of a frame."""


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
    if request.drafts:
        run.append(drafts_text(request.drafts))
    if request.state != "finished":
        run.append(request.error or request.state)
    spans = [*(stages.known() if stages is not None else ()), ("first token", request.first_token_s)]
    spans.append(("total", request.total_s))
    times = [f"{name.replace('_', ' ')} {span_text(span_s)}" for name, span_s in spans if span_s is not None]
    return [SEPARATOR.join(part) for part in (run, times) if part]


def cluster_line(snapshot: ClusterSnapshot) -> str:
    """Return `P0 up 3 waiting 40/512 pages · D0 up idle 0/512 pages · D1 down`. Loads are of the last heartbeat."""
    return SEPARATOR.join(_instance_text(instance) for instance in snapshot.instances)


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
            row += [_pages_text(load), f"{load.tokens}{_row_text(load)}", byte_text(load.bytes_moved)]
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
    return f"{text} {busy or 'idle'} {_pages_text(load)} pages{_row_text(load)}"


def _told_load(instance: InstanceSnapshot) -> LoadReport | None:
    """Return the load of an instance, or None before its first heartbeat."""
    return instance.load if instance.load is not None and instance.load.pages_total else None


def _row_text(load: LoadReport) -> str:
    """Return ` ×2.1`, the tokens that a step gives to a request, where tokens are drafted."""
    return f" ×{load.rates.tokens_a_row:.1f}" if load.drafts else ""


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


def show_trace(request_id: str, source: RouterClient | Path, as_json: bool = False, with_frames: bool = False) -> int:
    """Print the trace from a router, or from a folder of records. Return exit code 0, or 1 if KV pages of the two sides
    differ. Raise UnknownTrace, ConfigError, and the errors of `RouterClient`."""
    decode = _decoder() if with_frames else None
    if isinstance(source, RouterClient):
        answer = _ask(source, request_id)
    else:
        if not source.is_dir():
            raise ConfigError(f"--dir: {str(source)!r} is no folder")
        found = find_records(source, request_id)
        if all(record.room == "" and not isinstance(record, TraceRequest) for record in found.records):
            raise UnknownTrace(f"{source} has no records of request {request_id!r}")
        answer = answer_of(found, request_id)
    if as_json:
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        _show(answer.timeline, console)
        if decode is not None:
            for record in answer.records:
                if isinstance(record, TraceFrame):
                    console.print(_frame_text(record, decode), soft_wrap=True, markup=False)
    return 0 if all(check.is_same for check in answer.timeline.pages) else 1


def _ask(client: RouterClient, request_id: str) -> TraceAnswer:
    """Fetch the trace. Repeat for up to PATIENCE_S if records of a finished request are missing."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = client.trace(request_id)
            if is_whole(answer.records) or time.monotonic() >= end_s:
                return answer
        except UnknownTrace:
            if time.monotonic() >= end_s:
                raise
        time.sleep(POLL_S)


def is_whole(records: Iterable[AnyTraceRecord]) -> bool:
    """Return whether the records of both sides of each finished room are there, or the request still runs."""
    records = list(records)
    request = next((record for record in records if isinstance(record, TraceRequest)), None)
    if request is None or not request.path:
        return request is not None
    ended = {(record.room, record.instance) for record in records if isinstance(record, TraceEnd)}
    sent = {record.room for record in records if isinstance(record, TraceSent)}
    last = [choice[-1] for choice in request.choices]
    return all(
        (attempt.room, attempt.decode) in ended and (attempt.prefill is None or len(last) > 1 or attempt.room in sent)
        for attempt in last
        if attempt.state == "finished"
    )


def _show(timeline: Timeline, console: Console) -> None:
    console.print(f"{timeline.request_id}  {timeline.title}", style="bold", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    for name, justify in (("at", "right"), ("span", "right"), ("where", "left"), ("what", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column(
        "0 " + "─" * (BAR_WIDTH - 4 - len(span_text(timeline.total_s))) + " " + span_text(timeline.total_s)
    )
    table.add_column("", overflow="fold")
    for span in timeline.spans:
        style = "red" if span.is_error else ""
        bar = Text(_bar(span.start_s, span.end_s, timeline.total_s, span.marks_s))
        cells = (span_text(max(0.0, span.start_s)), span_text(span.end_s - span.start_s), span.where, span.what)
        table.add_row(*(Text(cell) for cell in cells), bar, Text(span.text), style=style)
    console.print(table)
    if timeline.pages:
        num_wrong = sum(not check.is_same for check in timeline.pages)
        verdict = f"{num_wrong} of {len(timeline.pages)} differ" if num_wrong else "the same on both sides"
        console.print(f"hashes of {len(timeline.pages)} KV pages: {verdict}", style="red" if num_wrong else "")
    for note in timeline.notes:
        console.print(f"! {note}", style="yellow", soft_wrap=True, markup=False)


def _bar(start_s: float, end_s: float, total_s: float, marks_s: Iterable[float]) -> str:
    def place(at_s: float) -> int:
        return min(BAR_WIDTH - 1, max(0, int(at_s / total_s * BAR_WIDTH))) if total_s > 0 else 0

    cells = [" "] * BAR_WIDTH
    first, last = place(start_s), place(end_s)
    cells[first : last + 1] = "█" * (last + 1 - first) if end_s > start_s else "▏"
    marks = [place(at_s) for at_s in marks_s]
    if marks:
        cells[first : last + 1] = "·" * (last + 1 - first)
    for mark in marks:
        cells[mark] = "┃"
    return "".join(cells)


def _decoder() -> Any:
    """Return the decoder of MessagePack's reference implementation, since it must be independent of our own codec."""
    try:
        import msgpack
    except ImportError as error:
        raise ConfigError(f"--frames needs the package msgpack ({error}): .venv/bin/pip install msgpack") from error
    return msgpack.unpackb


def _frame_text(frame: TraceFrame, decode: Any) -> str:
    arrow = "->" if frame.direction == "sent" else "<-"
    head = f"{frame.instance} {arrow} {frame.port} {frame.num_bytes} bytes"
    if not frame.data:
        return f"{head}  (too large to be recorded)"
    try:
        return f"{head}  {_shown(decode(frame.data, strict_map_key=False))}"
    except Exception as error:  # msgpack's, of several kinds
        return f"{head}  (no MessagePack: {error})"


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        more = f"... ({len(value)} bytes)" if len(value) > MAX_SHOWN_BYTES else ""
        return f"<{value[:MAX_SHOWN_BYTES].hex()}{more}>"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)
