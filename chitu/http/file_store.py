"""The folder of uploaded files and batches (`router.batches.dir`). Any thread; every method blocks.

    file-ID.json    record of a file, written last     file-ID.data    its content
    batch_ID.json   record of a batch                  batch_ID.input  another name of its input's content
    batch_ID.lock   locked by the process that runs it batch_ID.cancel there is one if it is to be cancelled
    batch_ID.reserve  room for the records of its end

Several routers may share the folder, and any may be killed anywhere. Invariants: a record under its
name is complete (written aside, synced, renamed); the record of a batch is written by its maker once, then only by the
process that has its lock; everything is of mode 0600. Names come from `new_id` alone, never from a client.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from chitu.config.schema import BatchesConfig
from chitu.errors import DiskFull, UnknownFile
from chitu.http.batch_lines import LineError
from chitu.lock_files import claim

_NAME = re.compile(r"(file-|batch_)[0-9a-f]{24}\Z")
ORPHAN_S = 86400.0
"""Age of a content without a record at which it is removed."""
RESERVE_BYTES = 128 << 10
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

BatchStatus = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelled"]
OVER = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int


class BatchRecord(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_max_age_s: float
    status: BatchStatus = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str
    error_file_id: str
    total: int = 0
    completed: int = 0
    failed: int = 0


RecordT = TypeVar("RecordT", FileRecord, BatchRecord)


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Return a new id. Ids of one second sort by time: 7 bytes of it in microseconds, then 5 random ones."""
    return f"{prefix}{time.time_ns() // 1000:014x}{os.urandom(5).hex()}"


class FileStore:
    def __init__(self, config: BatchesConfig, folder: Path) -> None:
        self.config = config
        self._folder = folder

    def path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}.{suffix}"

    # --------------------------------------------------------------------------------------------------------- records

    def write(self, record: FileRecord | BatchRecord) -> None:
        """Write a record. DiskFull or another OSError."""
        path, aside = self.path(record.id, "json"), self.path(record.id, f"{os.urandom(6).hex()}.partial")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            os.rename(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise as_full(error) from None
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def file(self, name: str, tenant: str | None) -> FileRecord:
        """Return the record of a tenant's (None: any) file. UnknownFile if there is none."""
        record = self._read(name, FileRecord, "file-")
        if record is None or tenant not in (None, record.tenant) or record.expires_at <= time.time():
            raise UnknownFile(f"there is no file {name[:80]!r}")
        return record

    def batch(self, name: str, tenant: str | None) -> BatchRecord:
        """Return the record of a tenant's (None: any) batch. UnknownFile if there is none."""
        record = self._read(name, BatchRecord, "batch_")
        if record is None or tenant not in (None, record.tenant):
            raise UnknownFile(f"there is no batch {name[:80]!r}")
        return record

    def files(self, tenant: str | None) -> list[FileRecord]:
        """Return a tenant's (None: all) files, the newest first."""
        now_s = time.time()
        return [file for file in self._all(FileRecord, "file-", tenant) if file.expires_at > now_s]

    def batches(self, tenant: str | None) -> list[BatchRecord]:
        return self._all(BatchRecord, "batch_", tenant)

    def _all(self, kind: type[RecordT], prefix: str, tenant: str | None) -> list[RecordT]:
        names = [name.removesuffix(".json") for name in self._names() if name.startswith(prefix)]
        read = [self._read(name, kind, prefix) for name in names if _NAME.match(name)]
        found = [record for record in read if record is not None and tenant in (None, record.tenant)]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def _read(self, name: str, kind: type[RecordT], prefix: str) -> RecordT | None:
        if not (name.startswith(prefix) and _NAME.match(name)):
            return None
        try:
            return msgspec.json.decode(self.path(name, "json").read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            return None  # of another version, or damaged from outside

    def _names(self) -> list[str]:
        """Return the names of all records, with `.json`."""
        try:
            return [name for name in os.listdir(self._folder) if name.endswith(".json")]
        except FileNotFoundError:
            return []

    # ----------------------------------------------------------------------------------------------------------- files

    def require_room(self, num_bytes: int) -> None:
        """Raise DiskFull if the folder may not hold so many bytes more, or no more files. Makes the folder."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        total, count = 0, 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.name.endswith(".json"):
                        count += 1
                    elif entry.name.endswith((".data", ".partial")):
                        total += entry.stat(follow_symlinks=False).st_size
        if count >= self.config.max_files:
            raise DiskFull(f"the server has {count} files and batches already (router.batches.max_files): delete some")
        if total + num_bytes > self.config.max_mb << 20:
            raise DiskFull(f"the server has no room for {num_bytes} bytes more (router.batches.max_mb): delete files")

    def create(self) -> tuple[str, BinaryIO]:
        """Return the id of a new file, and where to write its content."""
        name = new_id("file-")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return name, open(os.open(self.path(name, "data"), flags, 0o600), "wb")

    def remove(self, name: str) -> None:
        """Remove a file or batch, its record first, so that nothing refers to what is gone."""
        for suffix in ("json", "data", "input", "cancel", "reserve", "lock"):
            with contextlib.suppress(FileNotFoundError):
                self.path(name, suffix).unlink()

    # --------------------------------------------------------------------------------------------------------- batches

    def keep_input(self, batch: BatchRecord) -> None:
        """Give the batch its input under a name of its own, so that the file may be deleted."""
        source, target = self.path(batch.input_file_id, "data"), self.path(batch.id, "input")
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise UnknownFile(f"there is no file {batch.input_file_id!r}") from None
        except OSError:  # a file system without links
            try:
                shutil.copyfile(source, target)
                target.chmod(0o600)
            except OSError as error:
                raise as_full(error) from None

    def reserve(self, name: str) -> None:
        """Take the room that the records of the batch's end need, so that a full disk does not keep it from ending."""
        try:
            with open(os.open(self.path(name, "reserve"), os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(bytes(RESERVE_BYTES))
        except OSError as error:
            raise as_full(error) from None

    def release(self, name: str) -> None:
        self.path(name, "reserve").unlink(missing_ok=True)

    def claim(self, name: str) -> BinaryIO | None:
        """Return the lock of a batch, to be closed at its end; None if another process has it."""
        try:
            return claim(self.path(name, "lock"))
        except BlockingIOError:
            return None

    def ask_to_cancel(self, name: str) -> None:
        try:
            self.path(name, "cancel").touch(0o600)
        except OSError as error:
            raise as_full(error) from None

    def cancelled_at(self, name: str) -> int | None:
        """Return when the batch was asked to end; None if it was not."""
        try:
            return int(self.path(name, "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def open_batches(self, over: set[str]) -> list[BatchRecord]:
        """Return the batches that are not over, the oldest first. `over`: names that are known to be; it grows, and
        forgets those that are gone."""
        names = {name.removesuffix(".json") for name in self._names() if name.startswith("batch_")}
        over &= names
        found = [self._read(name, BatchRecord, "batch_") for name in names - over]
        over |= {record.id for record in found if record is not None and record.status in OVER}
        left = [record for record in found if record is not None and record.status not in OVER]
        return sorted(left, key=lambda record: (record.created_at, record.id))

    def remove_old(self, now_s: float) -> None:
        """Remove what has expired, and contents without a record that are old."""
        for file in self._all(FileRecord, "file-", None):
            if file.expires_at <= now_s:
                self.remove(file.id)
        wanted: set[str] = set()
        for batch in self.batches(None):
            if batch.status in OVER and batch.created_at + self.config.max_age_s <= now_s:
                self.remove(batch.id)
            elif batch.status not in OVER:
                wanted |= {batch.output_file_id, batch.error_file_id}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                name, _, suffix = entry.name.partition(".")
                if suffix == "json" or name in wanted or not _NAME.match(name) or self.path(name, "json").exists():
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < now_s - ORPHAN_S:
                        os.unlink(entry.path)


def as_full(error: OSError) -> OSError | DiskFull:
    """Return DiskFull for an error that says so, else the error."""
    return DiskFull(f"the server's disk is full: {error.strerror}") if error.errno in FULL else error
