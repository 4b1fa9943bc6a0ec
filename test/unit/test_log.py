"""The lines of the log: the fast formatter gives the same text as logging's own."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from chitu.lock_files import is_ours
from chitu.log import DeferredHandler, JsonFormatter, LogHandler, _Formatter, _Output, module_levels
from chitu.process.logs import TAIL_BYTES, LogTaken, claim_log, cut, last_text, make_log_dir, open_private
from chitu.types import new_room, room_text


def record(level: int, message: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("chitu.router.attempts", level, __file__, 1, message, args, exc_info)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        record(logging.INFO, "created pd request: %s -> P%d-D%d", "abc", 0, 1),
        record(logging.WARNING, "100 % without arguments"),
        record(logging.DEBUG, "%(name)s", {"name": "a mapping"}),
    ],
)
def test_a_line_has_the_moment_with_its_zone_and_what_was_said(line: logging.LogRecord) -> None:
    text = _Formatter("router").format(line)
    when, level, message = re.fullmatch(r"(\S+ \S+) router ([IWD]) chitu\.router\.attempts: (.+)", text).groups()  # type: ignore[union-attr]
    moment = datetime.fromisoformat(when)
    assert moment.tzinfo is not None and abs(moment.timestamp() - line.created) < 0.0011
    assert (level, message) == (line.levelname[0], line.getMessage())


@pytest.mark.parametrize("zone", ["UTC0", "XXX-5:30", "YYY3"])
def test_the_zone_is_the_machines_own(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        when = " ".join(_Formatter("P0").format(record(logging.INFO, "x")).split()[:2])
    finally:
        monkeypatch.undo()
        time.tzset()
    offset = {"UTC0": 0, "XXX-5:30": 330, "YYY3": -180}[zone]
    assert datetime.fromisoformat(when).utcoffset() == timedelta(minutes=offset)


def test_json_lines_can_be_read_by_machines() -> None:
    line = record(logging.WARNING, "request %s failed: %s", "abc", 'a "quote"\nand a line')
    line.request_id = "abc"
    assert json.loads(JsonFormatter("D1").format(line)) == {
        "time": _Formatter("D1").formatTime(line).replace(" ", "T"),
        "process": "D1",
        "level": "WARNING",
        "module": "chitu.router.attempts",
        "message": 'request abc failed: a "quote"\nand a line',
        "request_id": "abc",
    }
    assert "request_id" not in json.loads(JsonFormatter("D1").format(record(logging.INFO, "of nobody")))
    try:
        raise ValueError("odd")
    except ValueError:
        text = JsonFormatter("P0").format(record(logging.ERROR, "it died", exc_info=sys.exc_info()))
    assert "\n" not in text and json.loads(text)["traceback"].endswith("ValueError: odd")


def test_parts_have_levels_of_their_own_and_a_part_that_is_not_there_is_refused() -> None:
    assert module_levels(["kv_transfer=DEBUG", "router.attempts=ERROR"]) == {
        "chitu.kv_transfer": "DEBUG",
        "chitu.router.attempts": "ERROR",
    }
    for wrong in ("kv_transfer", "kv_transfer=LOUD", "nothing=INFO", "=INFO", "../test=INFO", "kv_transfer=debug"):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            module_levels([wrong])


def test_an_exception_comes_with_its_traceback() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        text = _Formatter("P0").format(record(logging.ERROR, "it died", exc_info=sys.exc_info()))
    assert " P0 E chitu.router.attempts: it died\nTraceback" in text and text.endswith("ValueError: odd")


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", [LogHandler, DeferredHandler])
def test_a_line_that_cannot_be_written_is_lost_and_hurts_nobody(
    kind: type[LogHandler], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)  # a library of another test may have turned it off
    handler = kind(FullDisk())
    handler.handle(record(logging.INFO, "nobody reads this"))
    handler.handle(record(logging.ERROR, "nor this"))
    handler.flush()
    assert capsys.readouterr().err == ""
    handler.handle(record(logging.INFO, "%d", "not a number"))
    assert "TypeError" in capsys.readouterr().err, "a mistake of ours is told"


def test_a_pipe_that_is_not_read_loses_lines_until_it_is_read_again() -> None:
    reader, writer = os.pipe()
    handler = LogHandler(io.TextIOWrapper(io.BufferedWriter(_Output(writer))))
    for _ in range(1000):  # more than a pipe holds
        handler.handle(record(logging.INFO, "x" * 100))
    handler.handle(record(logging.ERROR, "a long text: " + "y" * 100_000))
    assert len(os.read(reader, 1 << 20)) >= 60_000
    handler.handle(record(logging.INFO, "again"))
    assert os.read(reader, 1 << 20) == b"again\n"
    os.close(reader)
    handler.handle(record(logging.INFO, "nobody reads this"))
    os.close(writer)


def test_a_process_without_stderr_logs_nothing_and_works() -> None:
    script = "import logging; from chitu.log import setup_logging; setup_logging('P0'); logging.warning('lost')"
    ended = subprocess.run(["sh", "-c", f'exec "$0" -c "{script}" 2>&-', sys.executable], check=False)
    assert ended.returncode == 0


def test_a_terminal_that_is_read_gets_a_long_text_whole() -> None:
    """It takes a part of it at a time."""
    terminal, own = os.openpty()
    handler = LogHandler(io.TextIOWrapper(io.BufferedWriter(_Output(own), 1 << 16)))
    text = "\n".join(["x" * 99] * 600)
    writing = threading.Thread(target=handler.handle, args=(record(logging.ERROR, text),))
    writing.start()
    seen = b""
    while not seen.endswith(b"x\r\n") or seen.count(b"\n") < 600:
        seen += os.read(terminal, 1 << 16)
    writing.join()
    assert seen.count(b"x") == 600 * 99
    for descriptor in (terminal, own):
        os.close(descriptor)


def test_a_terminal_that_is_not_read_loses_lines_until_it_is_read_again() -> None:
    """It has room for the beginning of a line, and would wait with the rest."""
    terminal, own = os.openpty()
    handler = LogHandler(io.TextIOWrapper(io.BufferedWriter(_Output(own))))
    for _ in range(1000):
        handler.handle(record(logging.INFO, "x" * 100))
    os.set_blocking(terminal, False)
    seen = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            seen += os.read(terminal, 1 << 16)
    assert 4096 < len(seen) < 100_000
    handler.handle(record(logging.INFO, "again"))
    os.set_blocking(terminal, True)
    assert os.read(terminal, 1 << 16).endswith(b"again\r\n")
    for descriptor in (terminal, own):
        os.close(descriptor)


def test_rooms_are_random_version_4_uuids_and_printed_as_such() -> None:
    rooms = [new_room() for _ in range(100)]
    assert len(set(rooms)) == 100
    for room in rooms:
        read = uuid.UUID(bytes=room)
        assert read.version == 4 and read.variant == uuid.RFC_4122
        assert room_text(room) == str(read)
    assert room_text(b"\x01\x02") == "0102"


# ----------------------------------------------------------------------------------------------------------------------
# Logs of a launcher's processes: bounded, private, and read from the end.


@pytest.mark.parametrize(("size", "is_cut"), [(0, False), (100, False), (101, True), (300, True)])
def test_a_log_is_cut_beyond_its_bound_and_goes_on_at_its_beginning(tmp_path: Path, size: int, is_cut: bool) -> None:
    log, kept = tmp_path / "P0.log", tmp_path / "P0.log.1"
    with open_private(log) as writer:  # as a child process holds it
        writer.write(b"x" * size)
        assert cut(log, kept, 100) is is_cut
        writer.write(b"on\n")
    assert log.read_bytes() == (b"" if is_cut else b"x" * size) + b"on\n"
    assert (kept.read_bytes() if kept.exists() else b"") == (b"x" * size if is_cut else b"")


def test_the_next_cut_replaces_what_the_last_one_kept(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    for letter in (b"a" * 200, b"b" * 150):
        log.write_bytes(letter)
        assert cut(log, tmp_path / "P0.log.1", 100)
    assert ((tmp_path / "P0.log.1").read_bytes(), log.read_bytes()) == (b"b" * 150, b"")


def test_a_log_that_logrotate_has_renamed_is_not_lost_at_its_limit(tmp_path: Path) -> None:
    log, kept = tmp_path / "P0.log", tmp_path / "P0.log.1"
    with open_private(log) as writer:
        writer.write(b"a" * 101)
        log.rename(kept)
        assert cut(Path(f"/proc/self/fd/{writer.fileno()}"), kept, 100)
    assert kept.read_bytes() == b"a" * 101


def test_a_log_is_cut_though_its_copy_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_bytes(b"a" * 200)
    kept = tmp_path / "P0.log.1"
    kept.mkdir()
    assert cut(log, kept, 100) and log.stat().st_size == 0
    assert not cut(tmp_path / "missing.log", kept, 100)


def test_last_words_are_read_from_the_end_and_from_this_life_alone(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    log.write_bytes(b"of the last life\n")
    start = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"first\n" + b"." * (2 * TAIL_BYTES) + b"\nlast\n")
    text = last_text(log, start)
    assert len(text) == TAIL_BYTES and text.endswith("\nlast\n") and "first" not in text
    assert last_text(log, log.stat().st_size - 5) == "last\n"
    assert "cannot be read" in last_text(tmp_path / "missing.log", 0)


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_log_dir(str(tmp_path / "logs"))
        (folder / "old.log").touch(0o644)
        for name in ("new.log", "old.log"):
            open_private(folder / name).close()
            assert (folder / name).stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_fifo_in_the_place_of_a_log_or_its_lock_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "P0.log")
    os.mkfifo(tmp_path / "P0.lock")
    claim = claim_log(tmp_path / "P0.log")
    assert claim is not None
    with pytest.raises(LogTaken):
        claim_log(tmp_path / "P0.log")
    claim.close()
    with pytest.raises(OSError, match="No such device or address"):
        open_private(tmp_path / "P0.log")
    assert "cannot be read" in last_text(tmp_path / "P0.log", 0)


def test_a_log_whose_lock_was_deleted_is_claimed_anew(tmp_path: Path) -> None:
    claim = claim_log(tmp_path / "P0.log")
    assert claim is not None
    (tmp_path / "P0.lock").unlink()
    with claim, claim_log(tmp_path / "P0.log") as again:  # type: ignore[union-attr]
        assert not is_ours(claim, tmp_path / "P0.lock") and is_ours(again, tmp_path / "P0.lock")
