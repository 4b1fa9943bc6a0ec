"""Reading `multipart/form-data` (RFC 7578) part by part, as an upload arrives. Pure: bytes in, events out.

The framework's reader needs the whole body, or a temporary file of its own, before a route sees it. Memory here is
bounded: a part's head by `MAX_HEAD_BYTES`, its content by what one call of `feed` gets and the length of the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple

from chitu.errors import InvalidRequest

MAX_HEAD_BYTES = 8 << 10
"""Size of the head of a part."""
MAX_PARTS = 16


class PartBegins(NamedTuple):
    name: str
    filename: str | None
    """None if the part is a field."""


PartData = bytes
FormEvent = PartBegins | PartData


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a header Content-Type names. InvalidRequest if it is none of a form."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not 0 < len(boundary) <= 70:
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
    part = Message()
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            part["content-disposition"] = value.strip()
    names = part.get_param("name", header="content-disposition")
    filename = part.get_filename()
    if not isinstance(names, str) or part.get_content_disposition() != "form-data":
        raise InvalidRequest("the form is broken: a part has no name")
    return PartBegins(names, filename)
