"""The lines of the log: the short way of formatting them says what logging's own way says."""

from __future__ import annotations

import errno
import io
import logging
import re
import sys
import uuid

import pytest

from chitu.log import DeferredHandler, LogHandler, _Formatter
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
def test_a_line_is_what_logging_would_have_made_of_the_format(line: logging.LogRecord) -> None:
    formatter = _Formatter("router")
    expected = logging.Formatter(formatter._fmt, formatter.datefmt).format(line)
    assert formatter.format(line) == expected
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} router [IWD] chitu\.router\.attempts: .+", expected)


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


def test_rooms_are_random_version_4_uuids_and_printed_as_such() -> None:
    rooms = [new_room() for _ in range(100)]
    assert len(set(rooms)) == 100
    for room in rooms:
        read = uuid.UUID(bytes=room)
        assert read.version == 4 and read.variant == uuid.RFC_4122
        assert room_text(room) == str(read)
    assert room_text(b"\x01\x02") == "0102"
