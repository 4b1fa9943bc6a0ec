"""Request body of `/v1/batches`, and the answers about files and batches. Pure; see `ask/bodies.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from chitu.http.ask.bodies import MAX_METADATA, documented, note
from chitu.http.batch.lines import LineError

FILES, BATCHES = "/v1/files", "/v1/batches"


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Annotated[str, documented(enum=["created_at", "output_file_created_at"])]
    seconds: Annotated[Annotated[int, msgspec.Meta(ge=1)], note("at most `router.batches.max_age_s`")]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: Annotated[str, note("id of a file that was uploaded with the purpose `batch`")]
    endpoint: Annotated[str, note("path that every line's `url` has: a route for generation")]
    completion_window: Annotated[
        str, note("such as `24h`: a number of `s`, `m`, `h` or `d`, after which lines without an answer expire")
    ]
    metadata: Annotated[
        Annotated[dict[str, str], msgspec.Meta(max_length=MAX_METADATA)] | None,
        note("up to 1024 texts; repeated in the answer"),
    ] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, note("age of the output and error files at which they are removed")
    ] = None


class FileReply(msgspec.Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    """`batch` of an uploaded file, `batch_output` of an output or error file."""
    status: Literal["processed"]


class FilesReply(msgspec.Struct):
    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(msgspec.Struct):
    id: str
    object: Literal["file", "batch"]
    deleted: bool


class RequestCountsReply(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchErrorsReply(msgspec.Struct):
    object: Literal["list"]
    data: tuple[LineError, ...]


class BatchReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrorsReply | None
    """What is wrong with the input, or why the batch could not go on."""
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    """File of the answers with a status of 200 to 299; null until the batch is over, and if there are none."""
    error_file_id: str | None
    """File of all other lines' answers."""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCountsReply
    metadata: dict[str, str] | None


class BatchesReply(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchReply]
    first_id: str | None
    last_id: str | None
    has_more: bool
