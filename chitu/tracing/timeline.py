"""The timeline of a traced request, joined from records of router, P and D. Pure.

Made for `GET /trace/ID` and by `chitu trace --dir`; shown by `chitu trace` and the page. Clocks of machines need not
agree: an instance's records are shifted onto the router's clock so that a request arrives there when the router sent
it, or later if needed for causality (P's first byte after D's announcement, D's KV after P's last byte). After that its
own clock counts. The error is the latency of one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chitu.protocol.account import STAGES, DraftCounts, Moments, RequestSnapshot, laid_out, request_stages
from chitu.protocol.trace import (
    AnyTraceRecord,
    TraceArrival,
    TraceEnd,
    TraceLoss,
    TraceRequest,
    TraceRestored,
    TraceSend,
    TraceSent,
    TraceStep,
    TraceWrite,
)
from chitu.tracing.trace_files import FoundRecords, is_of

ROUTER = "router"
STAGES_OF_SPANS = {"writes to D": "transfer", "KV comes": "transfer", "tokens": "decode"}
"""Stages of the account that spans show which do not have their names: one side's part of a stage."""


class TimelineSpan(msgspec.Struct, frozen=True):
    where: str
    """Name of the process: `router`, `P0`, `D1`."""
    what: str
    start_s: float
    """Start, counted from the request's arrival at the router."""
    end_s: float
    text: str = ""
    is_error: bool = False
    marks_s: tuple[float, ...] = ()
    """Time of each token."""
    stage: str = ""
    """Stage of the account (`protocol/account.py:STAGES`) that it shows; empty if it shows none, or several."""


class PageCheck(msgspec.Struct, frozen=True):
    """A page of the prompt that both sides hashed."""

    room: str
    position: int
    prefill: str
    prefill_page: int
    """Page number in the pool; -1 if it was not recorded."""
    decode: str
    decode_page: int
    is_same: bool


class Timeline(msgspec.Struct, frozen=True):
    request_id: str
    title: str
    total_s: float
    spans: list[TimelineSpan]
    """Spans in the order of their start."""
    pages: list[PageCheck]
    notes: list[str]
    """Notes on missing records and on errors."""


class TraceAnswer(msgspec.Struct, frozen=True):
    """Body of `GET /trace/ID`."""

    timeline: Timeline
    records: list[AnyTraceRecord]


def with_running(
    found: FoundRecords, request_id: str, snapshots: Iterable[RequestSnapshot], now_s: float
) -> FoundRecords:
    """Return the records, with a record of the router made from its snapshots if the request still runs. The router
    records a request only when it is over."""
    if not found.records or any(isinstance(record, TraceRequest) for record in found.records):
        return found
    choices: dict[str, list[RequestSnapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.created_at_s):
        if is_of(snapshot.request_id, request_id):
            choices.setdefault(snapshot.request_id, []).append(snapshot)
    if not choices:
        return found
    start_s = min(attempts[0].created_at_s for attempts in choices.values())
    request = TraceRequest(
        request_id=request_id,
        room="",
        instance=ROUTER,
        at_s=now_s,
        path="",
        tenant="",
        arrived_s=start_s,
        received_s=start_s,
        error="",
        choices=tuple(tuple(attempts) for attempts in choices.values()),
    )
    return FoundRecords([*found.records, request], found.num_unreadable, found.is_cut)


def rooms_of(attempts: Iterable[RequestSnapshot]) -> set[str]:
    """Return the rooms that instances' records of these attempts have."""
    return {room for a in attempts for room in (a.room, a.prompt_room) if room is not msgspec.UNSET}


def answer_of(found: FoundRecords, request_id: str) -> TraceAnswer:
    return TraceAnswer(timeline_of(found, request_id), found.records)


def timeline_of(found: FoundRecords, request_id: str) -> Timeline:
    requests = [record for record in found.records if isinstance(record, TraceRequest)]
    request = max(requests, key=lambda record: record.at_s, default=None)
    attempts = [attempt for choice in request.choices for attempt in choice] if request is not None else []
    sent_s = {attempt.room: attempt.created_at_s for attempt in attempts}
    zero_s = request.arrived_s if request is not None else 0.0
    sent_s |= {a.prompt_room: a.created_at_s for a in attempts if a.prompt_room is not msgspec.UNSET}
    rooms: dict[tuple[str, str], list[AnyTraceRecord]] = {}
    for record in found.records:
        if record.room and (request is None or record.room in sent_s):  # else of another request with this id
            rooms.setdefault((record.room, record.instance), []).append(record)
    spans = _router_spans(request) if request is not None else []
    notes = _notes(found, request, len(requests))
    sides: dict[str, list[_Side]] = {}
    for (room, instance), records in rooms.items():
        if instance.startswith(ROUTER):  # frames, which have no span
            continue
        arrival = next((record for record in records if isinstance(record, TraceArrival)), None)
        if arrival is None:
            notes.append(f"{instance} has no record of the arrival of {room}")
            continue
        shift_s = sent_s.get(room, 0.0) - zero_s - arrival.at_s
        sides.setdefault(room, []).append(_Side(room, instance, records, shift_s))
    for pair in sides.values():
        _put_in_order(pair)
        announced_s = max((s.announced_s + s.shift_s for s in pair if s.announced_s is not None), default=0.0)
        spans += [span for side in pair for span in side.spans(announced_s)]
    pages = [check for pair in sides.values() for check in _page_checks(pair)]
    wrong = [check for check in pages if not check.is_same]
    notes += [
        f"KV differs in page {check.position} of the prompt: "
        f"{check.prefill} page {check.prefill_page}, {check.decode} page {check.decode_page}"
        for check in wrong
    ]
    total_s = request.at_s - zero_s if request is not None else max((span.end_s for span in spans), default=0.0)
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    return Timeline(request_id, _title(request), total_s, spans, pages, notes)


def _title(request: TraceRequest | None) -> str:
    if request is None:
        return "the router has no record of it"
    prompts = {choice[0].prompt_tokens for choice in request.choices}
    outputs = sum(choice[-1].output_tokens for choice in request.choices)
    num_attempts = max((len(choice) for choice in request.choices), default=0)
    parts = [request.path] if request.path else ["it still runs"]
    parts.append("+".join(map(str, sorted(prompts))) + " prompt tokens")
    parts.append(f"{outputs} output tokens")
    if len(request.choices) > 1:
        parts.append(f"{len(request.choices)} choices")
    parts.append(f"{num_attempts} attempt{'s' if num_attempts != 1 else ''}")
    return " · ".join([*parts, request.error] if request.error else parts)


def _notes(found: FoundRecords, request: TraceRequest | None, num_requests: int) -> list[str]:
    notes = []
    if num_requests > 1:
        notes.append(f"{num_requests} requests had this id: the last one is shown")
    for record in found.records:
        if isinstance(record, TraceLoss):
            notes.append(f"{record.num_records} records of {record.instance} were dropped, of this or other requests")
    if found.num_unreadable:
        notes.append(f"{found.num_unreadable} lines are no records of this version of chitu")
    if found.is_cut:
        notes.append("there are more records than the limit of one read")
    return notes


def _router_spans(request: TraceRequest) -> list[TimelineSpan]:
    zero_s, end_s = request.arrived_s, request.at_s
    moments = Moments(zero_s, request.received_s, end_s)
    stages = [list(laid_out(request_stages(moments, attempts), 0.0)) for attempts in request.choices or ((),)]
    begun = [stage for stage in stages[0] if stage[0] in ("receive", "prepare")]
    spans = [TimelineSpan(ROUTER, *stage, stage=stage[0]) for stage in begun]
    for choice in request.choices:
        for attempt in choice:
            pair = attempt.decode if attempt.prefill is None else f"{attempt.prefill} -> {attempt.decode}"
            until_s = end_s if attempt.ended_at_s is None else attempt.ended_at_s
            new_tokens = attempt.output_tokens - attempt.continued_tokens
            text = f"{attempt.state}{f' ({attempt.error})' if attempt.error else ''}, {new_tokens} tokens"
            what = f"attempt {attempt.attempt}: {pair}"
            if len(request.choices) > 1:
                what = f"{attempt.request_id.rpartition('-')[2]}: {what}"
            start_s = attempt.created_at_s - zero_s
            spans.append(TimelineSpan(ROUTER, what, start_s, until_s - zero_s, text, bool(attempt.error)))
    answer = max(each[-1] for each in stages)  # of the choice that ended last
    spans.append(TimelineSpan(ROUTER, *answer, request.error, bool(request.error), stage=answer[0]))
    return spans


class _Side:
    """Records of one instance of one room."""

    def __init__(self, room: str, instance: str, records: Sequence[AnyTraceRecord], shift_s: float) -> None:
        """Initialize with `shift_s`, the offset from its clock to that of the timeline."""
        self.shift_s = shift_s
        self.room = room
        self.instance = instance
        self._records = sorted(records, key=lambda record: record.at_s)
        self.send = next((record for record in records if isinstance(record, TraceSend)), None)
        self.sent = next((record for record in records if isinstance(record, TraceSent)), None)
        self.restored = next((record for record in records if isinstance(record, TraceRestored)), None)

    @property
    def _end(self) -> TraceEnd | None:
        return next((record for record in self._records if isinstance(record, TraceEnd)), None)

    @property
    def announced_s(self) -> float | None:
        """Time of D's announcement, on D's own clock; None for another instance."""
        if self.restored is None or self.restored.times.compute_s:
            return None
        return self._records[0].at_s + self.restored.admission_s

    @property
    def written_s(self) -> float | None:
        """End of P's last write, on its own clock; None without a write."""
        return max((record.at_s for record in self._records if isinstance(record, TraceWrite)), default=None)

    def spans(self, announced_s: float) -> list[TimelineSpan]:
        """Return the spans. `announced_s`: when D announced its pages, on the clock of the timeline."""
        shift_s = self.shift_s
        start_s, last_s = self._records[0].at_s + shift_s, self._records[-1].at_s + shift_s
        spans = [*self._of_prefill(start_s, shift_s, announced_s), *self._of_decode(start_s, shift_s)]
        end = self._end
        if not spans:
            spans.append(self._span("waits", start_s, last_s))
        if end is not None and end.reason in ("error", "cancelled"):
            at_s = end.at_s + shift_s
            text = f"{end.code}: {end.message}" if end.code else "the router cancelled it"
            spans.append(self._span(end.reason, at_s, at_s, text, is_error=end.reason == "error"))
        elif end is None:
            spans.append(self._span("no record of its end", last_s, last_s, is_error=True))
        return spans

    def _span(
        self,
        what: str,
        start_s: float,
        end_s: float,
        text: str = "",
        *,
        is_error: bool = False,
        marks_s: Iterable[float] = (),
    ) -> TimelineSpan:
        stage = STAGES_OF_SPANS.get(what, what if what in STAGES else "")
        return TimelineSpan(self.instance, what, start_s, max(start_s, end_s), text, is_error, tuple(marks_s), stage)

    def _of_prefill(self, start_s: float, shift_s: float, announced_s: float) -> list[TimelineSpan]:
        times = self.sent.times if self.sent is not None else None
        if self.restored is not None and self.restored.times.compute_s:  # unified
            times = self.restored.times
        spans = []
        if times is not None:
            begun_s, computed_s, _ = times.moments(start_s)
            queued_s = min(max(start_s, announced_s), begun_s)
            sent = self.send or self.restored
            cached = f"{sent.cached_tokens} of {sent.prompt_tokens} tokens cached" if sent is not None else ""
            spans += [self._span("queue", queued_s, begun_s), self._span("compute", begun_s, computed_s, cached)]
        writes = [record for record in self._records if isinstance(record, TraceWrite)]
        if writes:
            failed = [write.error for write in writes if write.error]
            num_buffers, num_bytes = (
                sum(write.num_buffers for write in writes),
                sum(write.total_bytes for write in writes),
            )
            text = f"{len(writes)} writes, {num_buffers} buffers, {num_bytes} bytes by {writes[0].transport}"
            text += f", {failed[0]}" if failed else ""
            begin_s = min(write.at_s - write.latency_s for write in writes) + shift_s
            done_s = max(write.at_s for write in writes) + shift_s
            spans.append(self._span("writes to D", begin_s, done_s, text, is_error=bool(failed)))
        return spans

    def _of_decode(self, start_s: float, shift_s: float) -> list[TimelineSpan]:
        spans = []
        steps = [record for record in self._records if isinstance(record, TraceStep)]
        restored = self.restored
        if restored is not None and not restored.times.compute_s:
            announced_s, landed_s = start_s + restored.admission_s, start_s + restored.landed_s
            spans.append(self._span("admission", start_s, announced_s, f"pages {_page_text(restored.pages.numbers)}"))
            text = f"{restored.total_bytes} bytes, {restored.cached_tokens} tokens were here"
            spans.append(self._span("KV comes", announced_s, landed_s, text))
        if steps:
            marks = [step.at_s + shift_s for step in steps]
            text = f"{len(steps)} tokens {_token_text(steps)}"
            text += f", {steps[-1].ended}" if steps[-1].ended else ""
            text += f", {drafts_text(self._end.drafts)}" if self._end is not None and self._end.drafts else ""
            spans.append(self._span("tokens", marks[0], marks[-1], text, marks_s=marks))
        return spans


def _put_in_order(sides: Sequence[_Side]) -> None:
    """Shift a side whose request message was late, so that no effect precedes its cause."""
    prefill = next((side for side in sides if side.send is not None), None)
    decode = next((side for side in sides if side.announced_s is not None), None)
    if prefill is None or prefill.send is None:
        return
    if decode is None or decode.announced_s is None or decode.restored is None:
        return
    prefill.shift_s += max(0.0, decode.announced_s + decode.shift_s - prefill.send.at_s - prefill.shift_s)
    if prefill.written_s is not None:
        late_s = prefill.written_s + prefill.shift_s - decode.restored.at_s - decode.shift_s
        decode.shift_s += max(0.0, late_s)


def _page_checks(sides: Sequence[_Side]) -> list[PageCheck]:
    """Compare the hashes of the positions that both sides hashed. D's ranks may hold several copies of a KV head."""
    sent = next(((side, side.sent.hashes) for side in sides if side.sent and side.sent.hashes), None)
    landed = next(
        ((side, side.restored, side.restored.hashes) for side in sides if side.restored and side.restored.hashes), None
    )
    if sent is None or landed is None:
        return []
    (prefill, theirs), (decode, restored, mine) = sent, landed
    found = dict(zip(mine.positions, mine.sums, strict=True))
    sources = prefill.send.pages.numbers if prefill.send is not None else ()
    checks = []
    for position, written in zip(theirs.positions, theirs.sums, strict=True):
        if position in found:
            expected = int(written, 16) * mine.head_copies % (1 << 64)
            page = (_at(sources, position), _at(restored.pages.numbers, position))
            is_same = int(found[position], 16) == expected
            names = prefill.instance, decode.instance
            checks.append(PageCheck(prefill.room, position, names[0], page[0], names[1], page[1], is_same))
    return checks


def _at(numbers: Sequence[int], position: int) -> int:
    return numbers[position] if position < len(numbers) else -1


def drafts_text(drafts: DraftCounts) -> str:
    """Return `drafts 8/10 prediction, 3/9 text`: the accepted of the drafted tokens."""
    return "drafts " + ", ".join([f"{accepted}/{drafted} {source}" for source, drafted, accepted in drafts])


def _page_text(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")


def _token_text(steps: Sequence[TraceStep]) -> str:
    ids = [step.next_token for step in steps]
    return "[" + " ".join(map(str, ids[:6])) + (" ...]" if len(ids) > 6 else "]")
