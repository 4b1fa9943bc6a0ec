"""The engine of batches: each line is answered once, wherever its process is killed; what is wrong with a file is said;
memory is bounded."""

from __future__ import annotations

import asyncio
import json
import resource
import tracemalloc
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu.http.batch import lines as batch_lines
from chitu.http.batch.lines import (
    Answers,
    BatchLine,
    ConnectionBroke,
    DamagedAnswers,
    GaveUp,
    LineLimits,
    OpenLines,
    Runner,
    Unreachable,
    answer_line,
    answer_rest,
    check_lines,
    verdict_on,
)
from chitu.http.wire.inner import Reply

LIMITS = LineLimits(max_lines=5000, max_line_bytes=10_000, urls=("/v1/completions",))
OK = Reply(200, b'{"text":"a"}', "r")


def line(i: Any, **more: Any) -> dict[str, Any]:
    return {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}} | more


def written(folder: Path, lines: Sequence[Any]) -> Path:
    path = folder / "in.jsonl"
    parts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"\n".join(parts))
    return path


def answered(*paths: Path) -> list[str]:
    return [json.loads(raw)["custom_id"] for path in paths for raw in path.read_bytes().splitlines()]


async def run(source: Path, answers: Answers, send: Any, patience_s: float | None = None, at_once: int = 8) -> None:
    answers.open()
    lines = OpenLines(source, LIMITS, answers.done)
    lines.open()
    try:
        await Runner(send, answers, at_once, patience_s).run(lines)
    finally:
        await answers.close()
        lines.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([b"{"], "line is not valid JSON"),
        ([b'{"custom_id": "\xff"}'], "line is not UTF-8: byte 0xff at 15"),
        ([b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"p": "\xc3"}}'], "not UTF-8"),
        ([b"[1]"], "line is no request"),
        ([line(0, body=3)], "line is no request"),
        ([line(0, body={"stream": True})], "not streamed"),
        ([line(0, method="GET")], "method must be 'POST', not 'GET'"),
        ([line(0, url="/v1/chat/completions")], "url must be '/v1/completions'"),
        ([line(0, more=1)], "unknown field `more`"),
        ([line(0, custom_id="")], "custom_id must have 1 to 512"),
        ([line(0, custom_id="x" * 513)], "custom_id must have 1 to 512"),
        ([line(0), line(0)], "custom_id is that of an earlier line"),
        ([line(0, body={"p": "x" * 20_000})], "longer than 10000 bytes"),
        ([json.dumps(line(0)).encode().replace(b'"a"', b"[" * 9_000)], "not valid JSON"),
        ([], "no lines"),
        ([b" ", b"\r"], "no lines"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, wrong: list[Any], says: str) -> None:
    right = [line(f"right{i}") for i in range(3)] if wrong and wrong[0] != b" " else []
    errors = check_lines(written(tmp_path, [*right, *wrong]), LIMITS).errors
    assert says in errors[0].message, errors
    assert len(errors) == 1
    assert errors[0].line == (3 + len(wrong) if right else None)


def test_a_byte_order_mark_ahead_of_a_line_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [BOM_UTF8 + json.dumps(line(i)).encode() + b"\r\n" for i in (0, 1)]
    path.write_bytes(b"".join([*lines, BOM_UTF8 + b"\n", json.dumps(line(2)).encode()]))
    found = check_lines(path, LIMITS)
    assert found.errors == () and len(found.ids) == 3


def test_a_file_with_too_many_lines_is_refused_and_a_line_too_long_hides_no_other(tmp_path: Path) -> None:
    few = LineLimits(2, 100, None)
    assert check_lines(written(tmp_path, [line(i) for i in range(3)]), few).errors[0].code == "too_many_lines"
    long = line(0, body={"p": "x" * 200})
    assert [e.line for e in check_lines(written(tmp_path, [long, long, line(1)]), few).errors] == [1, 2]


def test_errors_are_bounded(tmp_path: Path) -> None:
    assert len(check_lines(written(tmp_path, [b"{"] * 5000), LIMITS).errors) == batch_lines.MAX_ERRORS


def test_every_line_is_answered_once_wherever_it_was_cut_off(tmp_path: Path) -> None:
    """A run whose machine fails after some bytes of the output, as often as the file has bytes."""
    source, target = written(tmp_path, [line(i) for i in range(6)]), tmp_path / "out.jsonl"
    bodies = [b'{"text":"\xc3\xa9 and more of it"}']
    sent: Counter[str] = Counter()

    async def send(each: BatchLine) -> Reply:
        sent[each.custom_id] += 1
        return Reply(200 if each.custom_id != "r3" else 400, bodies[0])

    asyncio.run(run(source, Answers(target, target), send))
    whole = target.read_bytes()
    bodies[0] = b"1"  # the second answer is shorter than what is left of the first
    assert sorted(answered(target)) == [f"r{i}" for i in range(6)]
    for length in range(0, len(whole), 7):
        target.write_bytes(whole[:length])
        sent.clear()
        answers = Answers(target, target)
        asyncio.run(run(source, answers, send))
        assert sorted(answered(target)) == [f"r{i}" for i in range(6)]
        assert set(sent.values()) <= {1} and len(sent) == 6 - whole[:length].count(b"\n")
        assert (answers.counts.completed, answers.counts.failed) == (5, 1)


def test_a_file_that_has_no_answers_is_never_written_to(tmp_path: Path) -> None:
    source, target = written(tmp_path, [line(0)]), tmp_path / "out.jsonl"
    for other in (b"a letter", b"a letter\n", b'{"a": 1}\n', answer_line("r0", OK) * 2):
        target.write_bytes(other)
        with pytest.raises(DamagedAnswers):
            asyncio.run(run(source, Answers(target, target), None))
        assert target.read_bytes() == other


def test_a_run_that_is_cancelled_goes_on_or_has_the_rest_answered(tmp_path: Path) -> None:
    source = written(tmp_path, [line(i) for i in range(300)])
    good, bad = tmp_path / "good", tmp_path / "bad"
    never = asyncio.Event

    async def cancelled_after_100() -> None:
        count = 0

        async def send(each: BatchLine) -> Reply:
            nonlocal count
            count += 1
            if count > 100:
                await never().wait()
            return OK

        task = asyncio.ensure_future(run(source, Answers(good, bad), send))
        while len(good.read_bytes().splitlines() if good.exists() else ()) < 100:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answers = Answers(good, bad)
        answers.open()
        lines = OpenLines(source, LIMITS, answers.done)
        lines.open()
        await answer_rest(lines, answers, "batch_expired", "too late")
        await answers.close()

    asyncio.run(cancelled_after_100())
    assert Counter(answered(good, bad)) == Counter(f"r{i}" for i in range(300))
    assert len(answered(good)) == 100
    assert json.loads(bad.read_bytes().splitlines()[0])["error"] == {"code": "batch_expired", "message": "too late"}


def test_what_is_written_counts_although_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    """Of a batch that fails while answers are written, the output has as many lines as its record says."""
    target = tmp_path / "out.jsonl"

    async def cancelled_while_it_is_written() -> Answers:
        answers = Answers(target, target)
        answers.open()
        task = asyncio.ensure_future(answers.put("r0", answer_line("r0", OK), OK.status))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await answers.close()
        return answers

    assert asyncio.run(cancelled_while_it_is_written()).counts.completed == len(answered(target)) == 1


def test_a_full_disk_ends_the_run_with_what_fits_in_the_file(tmp_path: Path) -> None:
    source, target = written(tmp_path, [line(i) for i in range(100)]), tmp_path / "out.jsonl"

    async def send(each: BatchLine) -> Reply:
        return OK

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            asyncio.run(run(source, Answers(target, target), send))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < len(target.read_bytes()) <= 4000
    assert all(json.loads(raw) for raw in target.read_bytes().splitlines())
    asyncio.run(run(source, Answers(target, target), send))
    assert Counter(answered(target)) == Counter(f"r{i}" for i in range(100))


def test_a_busy_server_is_asked_again_and_one_that_fails_a_line_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "LAST_PAUSE_S", 0.0)
    source, target = written(tmp_path, [line(i) for i in range(5)]), tmp_path / "out.jsonl"
    sent: Counter[str] = Counter()
    busy = Reply(503, b'{"error":{"code":"no_instance"}}')

    async def send(each: BatchLine) -> Reply:
        sent[each.custom_id] += 1
        if sent[each.custom_id] < 12 and each.custom_id == "r0":
            return busy
        if each.custom_id == "r1":
            raise ConnectionBroke("it broke")
        if each.custom_id == "r2":
            return Reply(500, b"<html>", may_retry=sent[each.custom_id] < 2)
        if each.custom_id == "r3" and sent[each.custom_id] < 3:
            raise Unreachable("nobody listens")
        return OK

    monkeypatch.setattr(batch_lines, "FIRST_PAUSE_S", 0.0)
    asyncio.run(run(source, Answers(target, target), send))
    found = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_bytes().splitlines())}
    assert {name: each["status_code"] for name, each in found.items()} == {
        **{"r0": 200, "r1": 502, "r2": 500},
        **{"r3": 200, "r4": 200},
    }
    assert found["r2"]["body"] == "<html>"
    assert sent == {"r0": 12, "r1": batch_lines.MAX_FAILURES, "r2": 2, "r3": 3, "r4": 1}
    with pytest.raises(GaveUp, match="nobody"):
        target.unlink()

        async def unreachable(each: BatchLine) -> Reply:
            raise Unreachable("nobody")

        asyncio.run(run(source, Answers(target, target), unreachable, patience_s=0.0))


def test_the_verdict_on_a_reply_says_what_counts() -> None:
    assert verdict_on(Reply(429, b"")) == "busy"
    assert verdict_on(Reply(503, b'{"error":{"code":"overloaded"}}')) == "busy"
    assert verdict_on(Reply(503, b'{"error":{"code":"prefill_lost"}}')) == "failure"
    assert verdict_on(Reply(503, b"[" * 100_000)) == "failure"
    assert verdict_on(Reply(500, b"", may_retry=False)) == "answer"
    assert verdict_on(Reply(400, b"")) == "answer"


@given(st.binary(max_size=40) | st.text().map(lambda text: json.dumps({"a": text}, indent=2).encode()))
def test_an_answer_is_one_line_of_json_whatever_the_body_is(body: bytes) -> None:
    raw = answer_line('a"\n', Reply(200, body, "\x00"))
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")
    found = json.loads(raw)
    try:
        assert found["response"]["body"] == json.loads(body)
    except (ValueError, UnicodeDecodeError):
        assert found["response"]["body"] == body.decode("utf-8", "replace")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """7 MB of lines and as much of answers; what is held is a few lines, and the digests."""
    body = {"prompt": "x" * 9_000}
    source, target = written(tmp_path, [line(i, body=body) for i in range(700)]), tmp_path / "out.jsonl"
    reply = Reply(200, json.dumps({"text": "y" * 9_000}).encode())

    async def send(each: BatchLine) -> Reply:
        await asyncio.sleep(0)
        return reply

    tracemalloc.start()
    try:
        assert not check_lines(source, LIMITS).errors
        asyncio.run(run(source, Answers(target, target), send))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(answered(target)) == 700
    assert most < 3_500_000
