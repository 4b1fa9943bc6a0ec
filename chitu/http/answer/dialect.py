"""What an API is: its endpoints, each from a body to the format of its answer, and its fields. `table.py` has all.

An API of another vendor is a folder of `dialects/` with such an object, and a row of that table. Its bodies become
chats (`ask/translation.py`) or prompts of their own; there is one generation loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from chitu.http.answer.formats import AnswerHead, WholeFormat
from chitu.http.ask.fields import Unserved
from chitu.http.ask.parsed import ParsedRequest
from chitu.http.ask.reader import Read
from chitu.http.wire.exchange import PLAIN, ErrorForm

STATUSES = (404, 429, 499, 504)
"""Status codes of an endpoint that generates, besides 200 and those of every route."""


class Endpoint(NamedTuple):
    """A route whose bodies may be large: read in a process beside the loop if they are."""

    name: str
    """In files of requests that outlive their router, too."""
    path: str
    body: type[msgspec.Struct]
    read: Read
    """Makes a request of a body, or the whole answer."""
    answer: Callable[[AnswerHead, ParsedRequest], WholeFormat] | None = None
    """Makes the format of one answer, an `AnswerFormat` if it can be streamed. None: `read` makes the answer."""
    id_prefix: str = ""
    """How the id of an answer begins; the request id follows."""
    errors: ErrorForm = PLAIN
    reply: type[msgspec.Struct] | None = None
    """Answer that is not streamed; None: the cold application answers, and has the row for the document."""
    operation: tuple[str, str] = ("", "")
    """Summary and operation id, in the document."""
    statuses: tuple[int, ...] = STATUSES
    is_streamed: bool = True
    """Whether an answer may be streamed."""
    aliases: tuple[str, ...] = ()
    """Other paths at which clients look for it."""


class Dialect(NamedTuple):
    """An API."""

    endpoints: tuple[Endpoint, ...]
    unserved: Unserved
    """What becomes of fields that clients send, and the bodies do not have."""
    bodies: Mapping[str, type[msgspec.Struct]] = {}
    """Bodies of cold routes by path, without those of `endpoints`."""
