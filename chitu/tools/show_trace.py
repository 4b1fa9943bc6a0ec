"""`chitu trace ID`: the timeline of a traced request, from a running cluster or the folder of its records."""

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
from chitu.protocol.trace import AnyTraceRecord, TraceEnd, TraceFrame, TraceRequest, TraceSent
from chitu.tools.trace import span_text
from chitu.tracing.timeline import Timeline, TraceAnswer, answer_of
from chitu.tracing.trace_files import find_records

PATIENCE_S = 2.0
"""Time to wait for the records of instances, which are usually written within 0.1 s."""
POLL_S = 0.1
BAR_WIDTH = 32
MAX_SHOWN_BYTES = 24
"""Bytes shown of a binary field of a frame."""


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
