"""Each code that a client can get has a line with its status in the table of errors."""

from __future__ import annotations

import re
from pathlib import Path

from chitu.errors import ChituError, RequestError, ServiceError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"


def errors_below(cls: type[ChituError]) -> list[type[ChituError]]:
    return [cls, *(error for child in cls.__subclasses__() for error in errors_below(child))]


def test_each_code_has_its_line_with_its_status() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    for error in errors_below(RequestError) + errors_below(ServiceError)[1:]:
        if error.__module__ != "chitu.errors":
            continue  # of a command or of another test: no router answers with it
        line = next((line for line in lines if f"`{error.code}`" in line.split("|")[1]), None)
        assert line is not None, f"{error.code} is not in {PAGE.name}"
        statuses = re.findall(r"\d\d\d|4xx", line.split("|")[2])
        assert str(error.http_status) in statuses or ("4xx" in statuses and 400 <= error.http_status < 500), line
