"""OpenAI's `/v1/files` and `/v1/batches` (`store.py`, `batches.py`). Loop thread, with files in other threads.

A file belongs to the tenant of the API key that uploaded it; others get 404. An upload is written as it arrives, so its
size is bounded by the disk and not by memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from chitu.errors import InUse, InvalidRequest, PayloadTooLarge, UnknownFile, UnsupportedEncoding
from chitu.http.ask.reader import read_body
from chitu.http.batch.batches import Batches
from chitu.http.batch.bodies import (
    BATCHES,
    FILES,
    BatchBody,
    BatchErrorsReply,
    BatchesReply,
    BatchReply,
    DeletedReply,
    FileReply,
    FilesReply,
    RequestCountsReply,
)
from chitu.http.batch.index import OVER, FileRecord
from chitu.http.batch.store import BatchRecord, NewFile, as_full, new_id
from chitu.http.wire.access import Access
from chitu.http.wire.exchange import EXCHANGE, Exchange
from chitu.http.wire.multipart import FormParser, PartBegins, boundary_of
from chitu.http.wire.routes import BINARY, Route, json_response
from chitu.net.http import header, query_value

PURPOSE = "batch"
MAX_FIELD_BYTES = 4096
"""Size of a field of an upload, and of the rest of its form."""
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
WINDOW_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

T = TypeVar("T")
MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10000, 100
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": [PURPOSE]},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 1},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}


def file_routes(batches: Batches | None, access: Access) -> list[Route]:
    """Return the routes of files. `batches`: None if there is no folder; then they say so."""
    served = partial(_served, batches)

    async def create_file(request: Request) -> Response:
        """Upload a file of lines (multipart/form-data with `file` and `purpose`)."""
        exchange: Exchange = request.scope[EXCHANGE]
        upload = _Upload(served(), access.cache_salt(request.scope))
        return json_response(_file_reply(await upload.read(exchange)))

    async def list_files(request: Request) -> Response:
        tenant, wanted = access.trace_tenant(request.scope), query_value(request.scope, "purpose")
        found = await _disk(served().store.files, tenant)
        page = _Page(request, MAX_LISTED_FILES, MAX_LISTED_FILES)
        kept, has_more = page.cut([file for file in found if wanted in (None, file.purpose)])
        data = [_file_reply(file) for file in kept]
        return json_response(FilesReply("list", data, *_ends(data), has_more))

    async def get_file(request: Request) -> Response:
        return json_response(_file_reply(await found_file(request)))

    async def get_file_content(request: Request) -> Response:
        """Return the content of an uploaded file, or of a batch's output or error file."""
        file = await found_file(request)
        path = served().store.path(file.id, "data")
        if not await _disk(path.exists):
            raise UnknownFile(f"there is no file {file.id!r}")
        # The framework's answers to odd ranges are no error objects; a range may be ignored (RFC 9110, 14.2).
        request.scope["headers"] = [each for each in request.scope["headers"] if each[0] != b"range"]
        exchange: Exchange = request.scope[EXCHANGE]

        async def note_read() -> None:
            if exchange.is_complete and not exchange.is_client_gone and exchange.scope["method"] == "GET":
                await _disk(served().store.note_read, file.id)

        is_result = file.purpose == "batch_output" and file.tenant == access.cache_salt(request.scope)
        done = BackgroundTask(note_read) if is_result else None
        return FileResponse(path, media_type=BINARY, filename=file.filename, background=done)

    async def delete_file(request: Request) -> Response:
        """Delete a file. A batch that was made with it goes on."""
        file = await found_file(request)
        await _disk(served().store.remove, file.id)
        return json_response(DeletedReply(file.id, "file", True))

    async def found_file(request: Request) -> FileRecord:
        tenant = access.trace_tenant(request.scope)
        return await _disk(served().store.file, request.path_params["file_id"], tenant)

    return [
        Route("POST", FILES, create_file, FileReply, (507,), more=UPLOAD),
        Route("GET", FILES, list_files, FilesReply, more={"parameters": FILES_QUERY}),
        Route("GET", FILES + "/{file_id}", get_file, FileReply, (404,)),
        Route("DELETE", FILES + "/{file_id}", delete_file, DeletedReply, (404,)),
        Route("GET", FILES + "/{file_id}/content", get_file_content, None, (404,), (BINARY,)),
    ]


def batch_routes(batches: Batches | None, access: Access, takes_unknown: bool) -> list[Route]:
    """Return the routes of batches. `batches` as in `file_routes`."""
    served = partial(_served, batches)

    async def create_batch(request: Request) -> Response:
        """Have the lines of an uploaded file answered when there is room, before `completion_window` ends."""
        store, body = served().store, await read_body(request, BatchBody, takes_unknown)
        if body.endpoint not in served().endpoints:
            known = ", ".join(served().endpoints)
            raise InvalidRequest(f"endpoint: {body.endpoint[:80]!r} is none of {known}", "endpoint")
        window_s, max_age_s = _window_s(body.completion_window), store.config.max_age_s
        if body.output_expires_after is not None:
            max_age_s = _age_s(body.output_expires_after.seconds, max_age_s, "output_expires_after.seconds")
        tenant = access.cache_salt(request.scope)
        file = await _disk(store.file, body.input_file_id, access.trace_tenant(request.scope))
        if file.purpose != PURPOSE:
            raise InvalidRequest(f"input_file_id: file {file.id} has the purpose {file.purpose!r}", "input_file_id")
        batch = _new_batch(body, file, tenant, access.key_name(request.scope), window_s, max_age_s)
        await _disk(store.add, batch)
        served().look_soon()
        return json_response(_batch_reply(batch, served(), None))

    async def list_batches(request: Request) -> Response:
        found = await _disk(served().store.batches, access.trace_tenant(request.scope))
        kept, has_more = _Page(request, MAX_LISTED_BATCHES, 20).cut(found)
        data: list[BatchReply] = []
        for batch in kept:
            with contextlib.suppress(UnknownFile):  # it was deleted meanwhile
                data.append(await shown(await _disk(served().store.batch, batch.id, None)))
        return json_response(BatchesReply("list", data, *_ends(data), has_more))

    async def get_batch(request: Request) -> Response:
        return json_response(await shown(await found_batch(request)))

    async def delete_batch(request: Request) -> Response:
        """Delete a batch that is over. Its output and error files stay until they are deleted or expire."""
        batch = await found_batch(request)
        if batch.status not in OVER:
            raise InUse(f"batch {batch.id} is {batch.status}: cancel it, and delete it once it is cancelled")
        await _disk(served().store.remove, batch.id)
        return json_response(DeletedReply(batch.id, "batch", True))

    async def cancel_batch(request: Request) -> Response:
        """Send no more lines of a batch, and end those that run. Lines without an answer get the error
        `batch_cancelled`."""
        batch = await found_batch(request)
        if batch.status == "cancelled":
            return json_response(await shown(batch))
        if batch.status in OVER:
            raise InUse(f"batch {batch.id} is {batch.status} already")
        await _disk(served().store.ask_to_cancel, batch.id)
        return json_response(await shown(batch))

    async def found_batch(request: Request) -> BatchRecord:
        tenant = access.trace_tenant(request.scope)
        return await _disk(served().store.batch, request.path_params["batch_id"], tenant)

    async def shown(batch: BatchRecord) -> BatchReply:
        cancelled_at = None if batch.status in OVER else await _disk(served().store.cancelled_at, batch.id)
        return _batch_reply(batch, served(), cancelled_at)

    return [
        Route("POST", BATCHES, create_batch, BatchReply, (404, 507)),
        Route("GET", BATCHES, list_batches, BatchesReply, more={"parameters": _page_query(MAX_LISTED_BATCHES)}),
        Route("GET", BATCHES + "/{batch_id}", get_batch, BatchReply, (404,)),
        Route("DELETE", BATCHES + "/{batch_id}", delete_batch, DeletedReply, (404, 409)),
        Route("POST", BATCHES + "/{batch_id}/cancel", cancel_batch, BatchReply, (404, 409, 507)),
    ]


def _served(batches: Batches | None) -> Batches:
    if batches is None:
        raise InvalidRequest("files and batches need a folder on the router: set dp_config.router.batches.dir")
    return batches


def _new_batch(
    body: BatchBody, file: FileRecord, tenant: str, key_name: str, window_s: int, max_age_s: float
) -> BatchRecord:
    now_s = int(time.time())
    return BatchRecord(
        id=new_id("batch_"),
        tenant=tenant,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_max_age_s=max_age_s,
        created_at=now_s,
        expires_at=now_s + window_s,
        output_file_id=new_id("file-"),
        error_file_id=new_id("file-"),
        key_name=key_name,
    )


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _page_query(most: int) -> list[dict[str, Any]]:
    return [
        _query("after", {"type": "string"}),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": most}),
        _query("order", {"enum": ["asc", "desc"]}),
    ]


FILES_QUERY = [*_page_query(MAX_LISTED_FILES), _query("purpose", {"type": "string"})]


async def _disk(do: Callable[..., T], *arguments: Any) -> T:
    """Do something with the folder in another thread. Errors of a full disk become DiskFull."""
    try:
        return await asyncio.to_thread(do, *arguments)
    except OSError as error:
        raise as_full(error) from error


class _Upload:
    """One upload, from the first byte of its form to its record."""

    def __init__(self, batches: Batches, tenant: str) -> None:
        self._store = batches.store
        self._max_bytes = self._store.config.max_file_mb << 20
        self._tenant = tenant
        self._fields: dict[str, bytearray] = {}
        self._part = ""
        self._filename = ""
        self._num_bytes = 0
        self._has_file = False

    async def read(self, exchange: Exchange) -> FileRecord:
        """Return the record of the uploaded file. InvalidRequest, PayloadTooLarge, UnsupportedEncoding, DiskFull, and
        what `Exchange.part` raises; then nothing of it is left."""
        scope = exchange.scope
        if (header(scope, b"content-encoding") or b"identity").lower() != b"identity":
            raise UnsupportedEncoding("the Content-Encoding of an upload is not supported")
        form = FormParser(boundary_of((header(scope, b"content-type") or b"").decode("latin-1")))
        announced = header(scope, b"content-length") or b""
        num_bytes = int(announced) if announced.isdigit() else 0
        if num_bytes > self._max_bytes + (MAX_FIELD_BYTES << 2):
            raise self._too_large(num_bytes)
        new: NewFile = await _disk(self._store.create, self._tenant, min(num_bytes, self._max_bytes))
        try:
            while part := await exchange.part():
                for event in form.feed(part):
                    await self._take(event, new)
            form.close()
            return await self._finish(new)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(self._store.discard, new))
            raise

    async def _take(self, event: PartBegins | bytes, new: NewFile) -> None:
        if isinstance(event, PartBegins):
            self._begin(event)
        elif self._part == "file":
            self._num_bytes += len(event)
            if self._num_bytes > self._max_bytes:
                raise self._too_large(self._num_bytes)
            await _disk(self._store.append, new, event)
        else:
            field = self._fields[self._part]
            field += event
            if len(field) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"{self._part} has more than {MAX_FIELD_BYTES} bytes", self._part)

    def _begin(self, part: PartBegins) -> None:
        self._part = part.name
        if part.name in self._fields or (part.name == "file" and self._has_file):
            raise InvalidRequest(f"the form has {part.name} twice", part.name)
        if part.name == "file":
            self._filename = (part.filename or "upload.jsonl")[:255]
            self._has_file = True
        elif part.name in FIELDS:
            self._fields[part.name] = bytearray()
        else:
            raise InvalidRequest(f"{part.name[:80]}: {FILES} has no such field", part.name[:80])

    async def _finish(self, new: NewFile) -> FileRecord:
        if not self._has_file:
            raise InvalidRequest("file is required", "file")
        purpose = self._field("purpose")
        if purpose != PURPOSE:
            raise InvalidRequest(f"purpose: only {PURPOSE!r} is served, not {(purpose or '')[:40]!r}", "purpose")
        max_age_s, now_s = self._store.config.max_age_s, int(time.time())
        if (anchor := self._field("expires_after[anchor]")) not in (None, "created_at"):
            raise InvalidRequest(f"expires_after[anchor] must be 'created_at', not {anchor!r}", "expires_after[anchor]")
        if (seconds := self._field("expires_after[seconds]")) is not None:
            number = int(seconds) if re.fullmatch("[0-9]{1,12}", seconds) else 0
            max_age_s = _age_s(number, max_age_s, "expires_after[seconds]")
        if not self._num_bytes:
            raise InvalidRequest("file is empty", "file")
        record = FileRecord(
            *(new.id, self._tenant, self._filename, PURPOSE, self._num_bytes, now_s, now_s + math.ceil(max_age_s))
        )
        await _disk(self._store.keep, new, record)
        return record

    def _field(self, name: str) -> str | None:
        return self._fields[name].decode("utf-8", "replace") if name in self._fields else None

    def _too_large(self, num_bytes: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"a file of {num_bytes} bytes or more; at most {self._max_bytes} are accepted (router.batches.max_file_mb)"
        )


class _Page:
    """Which part of a list is asked for."""

    def __init__(self, request: Request, most: int, default: int) -> None:
        scope = request.scope
        limit = query_value(scope, "limit")
        self._limit = default if limit is None else int(limit) if re.fullmatch("[0-9]{1,9}", limit) else 0
        if not 1 <= self._limit <= most:
            raise InvalidRequest(f"limit must be from 1 to {most}", "limit")
        self._after = query_value(scope, "after")
        self._order = query_value(scope, "order") or "desc"
        if self._order not in ("asc", "desc"):
            raise InvalidRequest("order must be 'asc' or 'desc'", "order")

    def cut(self, records: Sequence[T]) -> tuple[list[T], bool]:
        """Return the part of `records`, the newest first, and whether there are more. InvalidRequest if `after` names
        none of them."""
        found = list(records) if self._order == "desc" else list(reversed(records))
        if self._after is not None:
            ids = [record.id for record in found]  # type: ignore[attr-defined]
            if self._after not in ids:
                raise InvalidRequest(f"after: the list has no {self._after[:80]!r}", "after")
            found = found[ids.index(self._after) + 1 :]
        return found[: self._limit], len(found) > self._limit


def _ends(data: Sequence[FileReply] | Sequence[BatchReply]) -> tuple[str | None, str | None]:
    return (data[0].id, data[-1].id) if data else (None, None)


def _window_s(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    window_s = int(found[1]) * WINDOW_UNITS[found[2]] if found else 0
    if not 0 < window_s <= 30 * WINDOW_UNITS["d"]:
        raise InvalidRequest("completion_window must be such as '24h', from '1s' to '30d'", "completion_window")
    return window_s


def _age_s(seconds: int, max_age_s: float, param: str) -> float:
    if not 1 <= seconds <= max_age_s:
        raise InvalidRequest(f"{param} must be from 1 to {max_age_s:g} (router.batches.max_age_s)", param)
    return seconds


def _file_reply(file: FileRecord) -> FileReply:
    return FileReply(
        *(file.id, "file", file.num_bytes, file.created_at, file.expires_at, file.filename, file.purpose, "processed")
    )


def _batch_reply(batch: BatchRecord, batches: Batches, cancelled_at: int | None) -> BatchReply:
    is_over, counts = batch.status in OVER, batches.counts(batch)
    return BatchReply(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        errors=BatchErrorsReply("list", batch.errors) if batch.errors else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status="cancelling" if cancelled_at is not None else batch.status,
        output_file_id=(batch.output_file_id or None) if is_over else None,
        error_file_id=(batch.error_file_id or None) if is_over else None,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        expires_at=batch.expires_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at or cancelled_at,
        cancelled_at=batch.cancelled_at,
        request_counts=RequestCountsReply(batch.total, counts.completed, counts.failed),
        metadata=batch.metadata,
    )
