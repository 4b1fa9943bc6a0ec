"""Timelines of records whose clocks do not agree."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chitu.protocol import CacheGroup
from chitu.protocol.account import STAGES, PrefillTimes, RequestSnapshot
from chitu.protocol.trace import (
    AnyTraceRecord,
    TraceArrival,
    TracedLayout,
    TracedPages,
    TracedSums,
    TraceEnd,
    TraceLoss,
    TraceRequest,
    TraceRestored,
    TraceSend,
    TraceSent,
    TraceStep,
    TraceWrite,
)
from chitu.tracing.timeline import Timeline, TimelineSpan, timeline_of
from chitu.tracing.trace_files import FoundRecords

LAYOUT = TracedLayout(1, 16, "float32", 1, (CacheGroup((0,), 2, (4, 4)),))
PAGES = {"P0": TracedPages.of([9, 4, 7]), "D0": TracedPages.of([1, 2, 3])}


def records(
    *, p_zero_s: float, d_zero_s: float, d_late_s: float = 0.0, sums: TracedSums | None = None
) -> list[AnyTraceRecord]:
    """Return the records of a request sent at 1.0 s on the router's clock. P gets it at once, computes for 0.2 s and
    writes until 0.3 s. D gets it `d_late_s` later, announces 0.01 s later, and has KV at 0.31 s of P's."""

    def at(instance: str, since_s: float) -> dict[str, Any]:
        zero_s = {"P0": p_zero_s, "D0": d_zero_s}[instance]
        return {"request_id": "r", "room": "room", "instance": instance, "at_s": zero_s + since_s}

    snapshot = RequestSnapshot("room", "r", "P0", "D0", "finished", 40, 1, 1.0, 1.4, 1.5, 8, None, "")
    arrived = {"prompt_tokens": 40, "continued_tokens": 0, "prompt_head": (5,)}
    both = {"prompt_tokens": 40, "cached_tokens": 0, "layout": LAYOUT, "bytes_by_layer": (3,), "total_bytes": 8}
    of_d = TracedSums((0, 1, 2), ("0" * 16, "8" + "0" * 15, "f" * 16), head_copies=2)
    return [
        TraceArrival(**at("P0", 0.0), **arrived),
        TraceArrival(**at("D0", d_late_s), **arrived),
        TraceSend(
            **at("P0", 0.1 + d_late_s), **both, token_range=(0, 40), slot=0, pages=PAGES["P0"], peer_pages=PAGES["D0"]
        ),
        TraceWrite(
            **at("P0", 0.3),
            what="kv",
            transport="shm",
            device="cpu",
            dtype="float32",
            layers=(0, 1),
            num_buffers=1,
            buffer_bytes=(8, 8),
            total_bytes=8,
            latency_s=0.1,
            error="",
        ),
        TraceSent(**at("P0", 0.3), total_bytes=8, times=PrefillTimes(0.0, 0.2, 0.1), hashes=sums),
        TraceRestored(
            **at("D0", 0.31),
            **both,
            slot=0,
            aux_slot=0,
            pages=PAGES["D0"],
            admission_s=0.01,
            landed_s=0.31 - d_late_s,
            hashes=of_d,
        ),
        TraceEnd(**at("P0", 0.3), reason="sent", code="", message="", output_tokens=0),
        TraceEnd(**at("D0", 0.31), reason="length", code="", message="", output_tokens=1),
        TraceRequest(
            request_id="r",
            room="",
            instance="router",
            at_s=1.6,
            path="/v1/completions",
            tenant="",
            arrived_s=0.9,
            received_s=0.95,
            error="",
            choices=((snapshot,),),
        ),
    ]


def span_of(line: Timeline, where: str, what: str) -> TimelineSpan:
    (found,) = [span for span in line.spans if (span.where, span.what) == (where, what)]
    return found


@pytest.mark.parametrize(("p_zero_s", "d_zero_s"), [(1.0, 1.0), (1e6, 5.0), (0.0, 3e7)])
@pytest.mark.parametrize("d_late_s", [0.0, 0.05])
def test_clocks_of_machines_need_not_agree(p_zero_s: float, d_zero_s: float, d_late_s: float) -> None:
    """No effect comes before its cause, even if D got its half late."""
    line = timeline_of(FoundRecords(records(p_zero_s=p_zero_s, d_zero_s=d_zero_s, d_late_s=d_late_s)), "r")
    writes, came = span_of(line, "P0", "writes to D"), span_of(line, "D0", "KV comes")
    assert span_of(line, "P0", "compute").start_s == pytest.approx(0.1, abs=1e-6)
    assert (writes.start_s, writes.end_s) == pytest.approx((0.3, 0.4), abs=1e-6)
    assert writes.end_s <= came.end_s + 1e-6 <= 0.411
    assert came.start_s <= writes.start_s and line.total_s == pytest.approx(0.7)
    assert [span.where for span in line.spans if span.what in ("receive", "prepare", "answer")] == ["router"] * 3
    stages = {span.what: span.stage for span in line.spans}
    assert set(stages.values()) <= {*STAGES, ""} and {what for what in stages if not stages[what]} == {
        "attempt 1: P0 -> D0"
    }
    assert (stages["compute"], stages["writes to D"], stages["KV comes"]) == ("compute", "transfer", "transfer")


def test_the_tokens_of_d_are_shown_with_its_drafts() -> None:
    found, of_d = [], {"request_id": "r", "room": "room", "instance": "D0"}
    for record in records(p_zero_s=1.0, d_zero_s=1.0):
        if isinstance(record, TraceEnd) and record.instance == "D0":
            step = {"index": 0, "last_token": 5, "next_token": 6, "new_pages": (), "ended": "length"}
            found.append(TraceStep(**of_d, at_s=1.305, **step))
            record = msgspec.structs.replace(record, drafts=(("prediction", 9, 7), ("text", 2, 0)))
        found.append(record)
    tokens = span_of(timeline_of(FoundRecords(found), "r"), "D0", "tokens")
    assert tokens.text == "1 tokens [6], length, drafts 7/9 prediction, 0/2 text"


@pytest.mark.parametrize(("queue_s", "starts_s"), [(0.05, 0.11), (0.005, 0.105)])
def test_the_queue_of_p_begins_when_d_has_announced(queue_s: float, starts_s: float) -> None:
    """D announces 10 ms after the arrival, at 0.1 s of the timeline. What P computes before has no queue."""
    times = PrefillTimes(queue_s, 0.2 - queue_s, 0.1)
    given = [
        msgspec.structs.replace(record, times=times) if isinstance(record, TraceSent) else record
        for record in records(p_zero_s=3.0, d_zero_s=9.0)
    ]
    queue = span_of(timeline_of(FoundRecords(given), "r"), "P0", "queue")
    assert (queue.start_s, queue.end_s) == pytest.approx((starts_s, 0.1 + queue_s), abs=1e-6)


def test_heads_that_ranks_share_count_once_and_a_page_that_differs_is_named() -> None:
    """D sums up every copy, modulo 2**64."""
    sums = TracedSums((0, 1, 2), ("0" * 16, "4" + "0" * 15, "7" + "f" * 15))
    line = timeline_of(FoundRecords(records(p_zero_s=0.0, d_zero_s=0.0, sums=sums)), "r")
    assert [check.is_same for check in line.pages] == [True, True, False]
    assert "KV differs in page 2 of the prompt: P0 page 7, D0 page 3" in line.notes


def test_what_is_missing_is_said() -> None:
    loss = TraceLoss(request_id="", room="", instance="P0", at_s=0.0, num_records=7)
    line = timeline_of(FoundRecords([loss, *records(p_zero_s=0.0, d_zero_s=0.0)], 2, is_cut=True), "r")
    text = " ".join(line.notes)
    assert "7 records of P0 were dropped" in text and "2 lines are no records" in text and "more records" in text
    without_router = timeline_of(FoundRecords(records(p_zero_s=5.0, d_zero_s=9.0)[:-1]), "r")
    assert without_router.title == "the router has no record of it"
    assert span_of(without_router, "P0", "compute").start_s == pytest.approx(0.0)
