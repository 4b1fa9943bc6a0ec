"""Reading `multipart/form-data` (RFC 7578) part by part, as an upload arrives. Pure: bytes in, events out.

The framework's reader needs the whole body, or a temporary file of its own, before a route sees it. Memory here is
bounded: a part's head by `MAX_HEAD_BYTES`, its content by what one call of `feed` gets and the length of the boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from chitu.errors import InvalidRequest

MAX_HEAD_BYTES = 8 << 10
"""Size of the head of a part."""
MAX_PARTS = 16
_PARAMETER = re.compile(r'\s*;\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\])')
CHARSETS = ("utf-8", "iso-8859-1", "us-ascii")
"""Charsets of `filename*`, a name in percent-encoding (RFC 8187). No other codec of Python is tried: some raise what
their callers do not expect."""


class PartBegins(NamedTuple):
    name: str
    filename: str | None
    """None if the part is a field."""


PartData = bytes
FormEvent = PartBegins | PartData


def parameters_of(value: str) -> tuple[str, dict[str, str]]:
    """Return what a header such as Content-Disposition names first, and its parameters, all names in lower case; of
    one that comes twice the first. InvalidRequest if it has something else."""
    end = value.find(";") % (len(value) + 1)
    kind, found = value[:end].strip().lower(), dict[str, str]()
    while value[end:].strip(" \t;"):
        match = _PARAMETER.match(value, end)
        if match is None:
            raise InvalidRequest(f"the form is broken: {value[end:][:80]!r} is no parameter of a header")
        name, quoted, plain = match.groups()
        found.setdefault(name.lower(), plain if quoted is None else _ESCAPED.sub(r"\1", quoted))
        end = match.end()
    return kind, found


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a header Content-Type names. InvalidRequest if it is none of a form."""
    kind, parameters = parameters_of(content_type)
    boundary = parameters.get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= 70:
        raise InvalidRequest("the body must be multipart/form-data with a boundary, as clients upload files")
    try:
        return boundary.encode("latin-1")
    except UnicodeEncodeError:
        raise InvalidRequest("the boundary of the form has characters that a header cannot have") from None


class FormParser:
    """Parser of one body. `feed` its bytes in order; `close` raises InvalidRequest unless its end has come."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._rest = b"\r\n"
        """Bytes that are not judged yet. The first boundary has no line break before it."""
        self._state = "preamble"
        self._num_parts = 0

    def feed(self, data: bytes) -> Iterator[FormEvent]:
        """Yield what these bytes complete: the beginning of a part, or more of its content. InvalidRequest."""
        self._rest += data
        while True:
            if self._state in ("preamble", "content"):
                at = self._rest.find(self._mark)
                end = at if at >= 0 else max(0, len(self._rest) - len(self._mark) + 1)
                if self._state == "content" and end:
                    yield self._rest[:end]
                self._rest = self._rest[end:]
                if at < 0:
                    return
                self._rest, self._state = self._rest[len(self._mark) :], "boundary"
            elif self._state == "boundary":
                if len(self._rest) < 2:
                    return
                if self._rest.startswith(b"--"):
                    self._state = "end"
                elif self._rest.startswith(b"\r\n"):
                    self._state = "head"  # which may be empty: keep this line break
                else:
                    raise InvalidRequest("the form is broken: something follows a boundary")
            elif self._state == "head":
                at = self._rest.find(b"\r\n\r\n")
                if at < 0 or at > MAX_HEAD_BYTES:
                    if len(self._rest) > MAX_HEAD_BYTES:
                        raise InvalidRequest(f"the form is broken: a part's head has more than {MAX_HEAD_BYTES} bytes")
                    return
                self._num_parts += 1
                if self._num_parts > MAX_PARTS:
                    raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
                yield _part_of(self._rest[2:at])
                self._rest, self._state = self._rest[at + 4 :], "content"
            else:
                self._rest = b""  # an epilogue has no meaning
                return

    def close(self) -> None:
        if self._state != "end":
            raise InvalidRequest("the form is broken: it ends within a part")


def _part_of(head: bytes) -> PartBegins:
    kind, parameters = "", dict[str, str]()
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            kind, parameters = parameters_of(value)
    if odd := [name for name in parameters if "*" in name and name != "filename*"]:
        raise InvalidRequest(f"the form is broken: a part has {odd[0][:80]!r}, which forms do not have (RFC 7578)")
    if kind != "form-data" or "name" not in parameters:
        raise InvalidRequest("the form is broken: a part has no name")
    filename = parameters.get("filename")
    if (encoded := parameters.get("filename*")) is not None:
        filename = _decoded(encoded)
    return PartBegins(parameters["name"], filename)


def _decoded(encoded: str) -> str:
    """Return the name that `filename*` encodes."""
    charset, *rest = encoded.split("'", 2)
    if charset.lower() not in CHARSETS or len(rest) < 2:
        raise InvalidRequest(
            f"the form is broken: filename* is {encoded[:80]!r}; it must be CHARSET'LANGUAGE'NAME with one of the "
            f"charsets {', '.join(CHARSETS)}"
        )
    try:
        return unquote_to_bytes(rest[1]).decode(charset)
    except UnicodeDecodeError:
        raise InvalidRequest(f"the form is broken: filename* is {encoded[:80]!r}, which is not {charset}") from None
