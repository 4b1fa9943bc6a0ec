"""Trace records on their way: bounded everywhere, drops counted and reported, only a request's own records found."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.clock import FakeClock
from support.requests import decode_request, prefill_request

from chitu.config.schema import TraceConfig
from chitu.errors import InvalidRequest
from chitu.http.fleet.trace_routes import records_of
from chitu.net.threads import ServiceThread
from chitu.protocol import Fork, KVLayout, SamplingParams, TraceLines, encode, pack_i32
from chitu.protocol.account import RequestSnapshot
from chitu.protocol.cluster import stats_codec
from chitu.protocol.trace import (
    MAX_FRAME_BYTES,
    AnyTraceRecord,
    TraceArrival,
    TraceEnd,
    TraceFrame,
    TraceLoss,
    TraceRequest,
)
from chitu.tracing.trace_files import (
    BLOCK_BYTES,
    MAX_FOUND_BYTES,
    MAX_WAITING_BYTES,
    RouterTrace,
    TraceFiles,
    find_records,
    is_of,
)
from chitu.tracing.tracer import LINGER_S, MAX_FRAME_SHARE_BYTES, MAX_QUEUED, Tracer
from chitu.types import Role

ROOM, OTHER = bytes(range(16)), bytes(16 * [7])
LAYOUT = KVLayout.uniform("m", 2, 1, 2, 1, "float32", 8)


def ended(request_id: str, instance: str = "D0", message: str = "") -> TraceEnd:
    return TraceEnd(
        request_id=request_id,
        room="r",
        instance=instance,
        at_s=1.0,
        reason="stop",
        code="",
        message=message,
        output_tokens=1,
    )


class Written(TraceFiles):
    """Trace files that are written in the caller's thread."""

    def write(self, name: str, lines: bytes, num_dropped: int = 0) -> None:
        self._is_started = True
        super().write(name, lines, num_dropped)
        self._writer.run_one()


def test_a_file_goes_on_empty_beyond_its_bound_and_one_before_it_is_kept(tmp_path: Path) -> None:
    files = Written(tmp_path / "t", 2000)
    for n in range(100):
        files.add(ended(f"r{n}"))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "t").iterdir()}
    assert set(sizes) == {"D0.jsonl", "D0.jsonl.1"} and max(sizes.values()) < 2500
    assert [each.request_id for each in find_records(tmp_path / "t", "r99").records] == ["r99"]
    assert not find_records(tmp_path / "t", "r0").records


def test_a_disk_that_takes_nothing_costs_records_which_are_counted(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    files = Written(blocked / "t", 1 << 20)
    files.add(ended("a"))
    files.write("D0", b"{}\n{}\n", num_dropped=5)
    blocked.unlink()
    files.add(ended("b"))
    found = find_records(blocked / "t", "b").records
    losses = [each.num_records for each in found if isinstance(each, TraceLoss)]
    assert losses == [1 + 5 + 2]
    assert found[-1].request_id == "b"


@pytest.mark.parametrize("kind", ["directory", "fifo", "dangling link"])
def test_odd_entries_cost_their_own_records_alone(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = {"directory": Path.mkdir, "fifo": os.mkfifo, "dangling link": lambda path: path.symlink_to("nothing")}[kind]
    make(tmp_path / "D0.jsonl")
    make(tmp_path / "D1.jsonl.1")
    files = Written(tmp_path, 1000)
    for n in range(20):
        files.add(ended(f"r{n}"))
        files.add(ended(f"r{n}", "D1"))
    assert caplog.text.count("trace records of D0 cannot be written") == 1
    assert [each.instance for each in find_records(tmp_path, "r19").records if isinstance(each, TraceEnd)] == ["D1"]
    assert (tmp_path / "D1.jsonl").stat().st_size < 1500


def test_a_file_that_a_cleaner_deletes_is_made_again(tmp_path: Path) -> None:
    files = Written(tmp_path, 1000)
    files.add(ended("r0"))
    (tmp_path / "D0.jsonl").unlink()
    files.add(ended("r1"))
    assert [each.request_id for each in find_records(tmp_path, "r1").records] == ["r1"]


def test_a_slow_disk_holds_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path, 2 * MAX_WAITING_BYTES)
    files._is_started = True  # with no thread that writes
    line = b"x" * (MAX_WAITING_BYTES // 10 - 1) + b"\n"
    for _ in range(20):
        files.write("P0", line)
    while files._writer.run_one():
        pass
    assert (tmp_path / "P0.jsonl").stat().st_size == 10 * len(line)
    files.add(ended("r", "P0"))
    while files._writer.run_one():
        pass
    assert [e.num_records for e in find_records(tmp_path, "r").records if isinstance(e, TraceLoss)] == [10]


def test_only_the_records_of_a_request_and_its_choices_are_found(tmp_path: Path) -> None:
    files = Written(tmp_path, 1 << 20)
    names = ["abc", "abc-0", "abc-12", "abcd", "xabc", "abc-", "abc-x", 'odd"\\id', "other"]
    for name in names:
        files.add(ended(name, message='"request_id":"abc"'))
    (tmp_path / "P0.jsonl").write_bytes(b'{"request_id":"abc","kind":"nonsense"}\n\xff"request_id":"abc"\n')
    found = find_records(tmp_path, "abc")
    assert [record.request_id for record in found.records] == ["abc", "abc-0", "abc-12"]
    assert found.num_unreadable == 2
    assert [record.request_id for record in find_records(tmp_path, 'odd"\\id').records] == ['odd"\\id']
    assert is_of("a-1-2", "a-1") and not is_of("a-1-2", "a")


def test_too_many_records_are_cut_and_said(tmp_path: Path) -> None:
    files = Written(tmp_path, 4 * MAX_FOUND_BYTES)
    long = "x" * (MAX_FOUND_BYTES // 10)
    assert len(long) > 2 * BLOCK_BYTES, "lines span several blocks"
    for _ in range(20):
        files.add(ended("a", message=long))
    found = find_records(tmp_path, "a")
    assert found.is_cut and 5 < len(found.records) < 20


class Socket:
    def __init__(self) -> None:
        self.sent: list[TraceLines] = []
        self.is_full = False

    def send(self, frame: bytes) -> bool:
        message = stats_codec.decode(frame)
        assert isinstance(message, TraceLines)
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def close(self) -> None: ...

    def records(self) -> list[AnyTraceRecord]:
        decoder = msgspec.json.Decoder(AnyTraceRecord)
        return [record for message in self.sent for record in decoder.decode_lines(message.lines)]


def started() -> tuple[Tracer, Socket, FakeClock]:
    """Return a tracer without its thread: the test sends what waits."""
    socket, clock = Socket(), FakeClock()
    made = Tracer(Role.DECODE, 1, 9, LAYOUT, "cpu", lambda: [socket], clock)
    made._thread = ServiceThread("trace", lambda: None)
    return made, socket, clock


def test_rooms_that_are_not_traced_leave_nothing() -> None:
    made, socket, _ = started()
    made.add(ROOM, TraceEnd, reason="stop", code="", message="", output_tokens=1)
    made.frame(ROOM, "sent", "control", b"x")
    made.send_waiting([socket])
    assert not made.rooms and not socket.sent


def test_each_choice_arrives_and_is_forgotten_after_its_end() -> None:
    made, socket, clock = started()
    forks = (Fork(OTHER, "r-1", 5),)
    message = decode_request(ROOM, "r-0", pack_i32([5, 6]), SamplingParams(3), 0, 1, forks=forks, trace="records")
    made.begin(message, encode(message))
    made.frame(ROOM, "sent", "control", b"not wanted")
    made.send_waiting([socket])
    arrivals = socket.records()
    assert [(type(a), a.request_id) for a in arrivals] == [(TraceArrival, "r-0"), (TraceArrival, "r-1")]
    assert isinstance(arrivals[0], TraceArrival) and arrivals[0].prompt_head == (5, 6)
    made.end(OTHER)
    clock.advance(LINGER_S + 1)
    made._forget_ended()
    assert list(made.rooms) == [ROOM]


def test_the_thread_sleeps_between_two_looks_and_sends_what_waits_at_its_end() -> None:
    """A thread that spun would cost more than all the tracing."""
    socket, looks = Socket(), 0

    class Watched(FakeClock):
        def monotonic(self) -> float:
            nonlocal looks
            looks += threading.current_thread().name == "trace"
            return super().monotonic()

    made = Tracer(Role.DECODE, 1, 9, LAYOUT, "cpu", lambda: [socket], Watched(), pause_s=30.0)
    for room in (ROOM, OTHER):
        made.begin(prefill_request(room, "r", pack_i32([5]), 0, 1, trace="records"), b"")
    made.close()
    assert looks == 0 and len(socket.records()) == 2


def test_records_beyond_the_bounds_are_dropped_counted_and_said() -> None:
    made, socket, _ = started()
    message = prefill_request(ROOM, "r", pack_i32([5]), 0, 1, trace="frames")
    made.begin(message, b"12345")  # two records
    num_frames = MAX_FRAME_SHARE_BYTES // MAX_FRAME_BYTES - 1  # what fits beside that one
    for _ in range(num_frames + 2):
        made.frame(ROOM, "sent", "control", bytes(MAX_FRAME_BYTES))
    for _ in range(MAX_QUEUED - 2 - num_frames + 13):
        made.add(ROOM, TraceEnd, reason="sent", code="", message="", output_tokens=0)
    socket.is_full = True
    made.send_waiting([socket])
    socket.is_full = False
    made.add(ROOM, TraceEnd, reason="sent", code="", message="", output_tokens=0)
    made.send_waiting([socket])
    assert [message.num_dropped for message in socket.sent] == [2 + 13 + MAX_QUEUED]
    made.frame(ROOM, "sent", "control", b"x" * (MAX_FRAME_BYTES + 1))
    made.send_waiting([socket])
    large = socket.records()[-1]
    assert isinstance(large, TraceFrame) and large.data == b"" and large.num_bytes == MAX_FRAME_BYTES + 1
    assert socket.sent[-1].num_dropped == 0


@pytest.mark.parametrize("given", [b"", b"2", b"true", b"1, 1", b"\xff"])
def test_a_header_that_says_nothing_is_refused(given: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="X-Chitu-Trace"):
        RouterTrace(TraceConfig(), TraceFiles(tmp_path, 1), "router", FakeClock()).level(given)


def test_the_header_goes_over_the_sample_unless_the_operator_wants_none(tmp_path: Path) -> None:
    def level(given: bytes | None, **config: object) -> str:
        trace = TraceConfig(**config)  # type: ignore[arg-type]
        return RouterTrace(trace, TraceFiles(tmp_path, 1), "router", FakeClock()).level(given)

    assert (level(None), level(b"1"), level(b"frames"), level(b"0")) == ("", "records", "frames", "")
    assert (level(None, sample=1.0), level(b"0", sample=1.0)) == ("records", "")
    assert level(None, sample=1.0, by_header=False) == "records" and level(b"0", by_header=False) == ""
    with pytest.raises(InvalidRequest, match=r"trace\.by_header"):
        level(b"1", by_header=False)


def attempt(room: str, tenant: str = "", **fields: Any) -> RequestSnapshot:
    return RequestSnapshot(room, "r", "P0", "D0", "finished", 4, 1, 1.0, 1.4, 1.5, 8, None, "", tenant=tenant, **fields)


def traced(tenant: str, *attempts: RequestSnapshot) -> TraceRequest:
    times = {"at_s": 1.6, "arrived_s": 0.9, "received_s": 0.95}
    return TraceRequest(
        request_id="r", room="", instance="router", path="/", tenant=tenant, error="", choices=(attempts,), **times
    )


def test_each_tenant_reads_its_own_records_of_an_id_that_both_used(tmp_path: Path) -> None:
    files = Written(tmp_path, 1 << 20)
    frame = {"request_id": "r", "instance": "router", "at_s": 1.0, "direction": "received", "num_bytes": 3}
    for room in ("a1", "a-prompt", "b1", "a2"):
        files.add(msgspec.structs.replace(ended("r", message=room), room=room))
        files.add(TraceFrame(**frame, room=room, port="token", data=b"abc"))
        files.add(TraceFrame(**frame, room=room, port="request", data=b"abc"))
    files.add(traced("a", attempt("a1", "a", prompt_room="a-prompt")))
    files.add(traced("b", attempt("b1", "b")))
    for tenant, running, rooms in (
        ("a", [], {"", "a1", "a-prompt"}),
        ("b", [], {"", "b1"}),
        ("a", [attempt("a2", "a")], {"", "a1", "a2", "a-prompt"}),
        ("c", [], set()),
        (None, [], {"", "a1", "a-prompt", "b1", "a2"}),
    ):
        found = records_of(tmp_path, "r", tenant, running).records
        assert {record.room for record in found} == rooms
        assert all(each.tenant == tenant for each in found if isinstance(each, TraceRequest) and tenant)
        data = {(each.port, each.data) for each in found if isinstance(each, TraceFrame)}
        tokens = b"abc" if tenant is None else b""
        assert data <= {("token", tokens), ("request", b"abc")}, "a message with tokens has those of other requests"


def test_records_of_other_tenants_take_no_room_from_a_read(tmp_path: Path) -> None:
    files = Written(tmp_path, 4 * MAX_FOUND_BYTES)
    for n in range(20):
        files.add(msgspec.structs.replace(ended("r", message="x" * (MAX_FOUND_BYTES // 10)), room=f"b{n}"))
        files.add(traced("b", attempt(f"b{n}", "b")))
    files.add(msgspec.structs.replace(ended("r"), room="a1"))
    files.add(traced("a", attempt("a1", "a")))
    found = records_of(tmp_path, "r", "a", [])
    assert [record.room for record in found.records] == ["a1", ""] and not found.is_cut
