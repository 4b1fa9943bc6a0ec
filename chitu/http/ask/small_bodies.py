"""The bodies of cold routes, which are small. Their application has the table of all bodies. Loop thread."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import Request

from chitu.errors import PayloadTooLarge
from chitu.http.ask.bodies import LARGE_BODY_BYTES
from chitu.http.ask.decoder import BodyTable, warning_header
from chitu.http.wire.exchange import EXCHANGE

StructT = TypeVar("StructT", bound=msgspec.Struct)


async def read_body(request: Request, kind: type[StructT], takes_unknown: bool = False) -> StructT:
    """Return a small body. Unknown fields of it are errors, or warnings if `takes_unknown`."""
    table: BodyTable = request.app.state.bodies
    raw = await request.body()
    if len(raw) > LARGE_BODY_BYTES:
        raise PayloadTooLarge(f"a body of {len(raw)} bytes; at most {LARGE_BODY_BYTES} are accepted here")
    warnings: list[str] = []
    body = table.decoder(kind).decode(raw, warnings if takes_unknown else None)
    if warnings:
        request.scope[EXCHANGE].headers.append(warning_header(warnings))
    return body
