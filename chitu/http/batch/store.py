"""The folder of uploaded files and batches (`router.batches.dir`). Any thread; every method blocks.

    file-ID.json    record of a file, written last     file-ID.data    its content
    file-ID.read    there is one if it is an output that its tenant has read
    file-ID.TENANT.upload  content that is being uploaded, as large as it may become
    batch_ID.json   record of a batch                  batch_ID.input  another name of its input's content
    batch_ID.lock   locked by the process that runs it batch_ID.cancel there is one if it is to be cancelled
    batch_ID.reserve  room for the records of its end

Several routers may share the folder, and any may be killed anywhere. Invariants: a record under its
name is complete (written aside, synced, renamed); the record of a batch is written by its maker once, then only by the
process that has its lock; everything is of mode 0600. Names come from `new_id` alone, never from a client. What this
process takes of the folder is within its bounds (`shares.py`); routers that take some in the same moment may pass
them by that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeVar

import msgspec

from chitu.config.schema import BatchesConfig
from chitu.errors import DiskFull, UnknownFile
from chitu.http.batch.index import NAME, BatchFacts, BatchStatus, FileRecord, FolderIndex
from chitu.http.batch.lines import LineError
from chitu.http.batch.shares import Bounds, Room, room_for, room_to_grow
from chitu.known_types import known
from chitu.lock_files import claim

logger = logging.getLogger(__name__)

ORPHAN_S = 86400.0
"""Age of a content without a record at which it is removed."""
RESERVE_BYTES = 128 << 10
GROWTH = 8
"""An upload without an announced length takes room for an eighth of what it has more than it needs."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
    key_name: str = ""
    """Which key's bounds its lines have (`Access.key_name`)."""
    total: int = 0
    completed: int = 0
    failed: int = 0


RecordT = TypeVar("RecordT", FileRecord, BatchRecord)
ListedT = TypeVar("ListedT", FileRecord, BatchFacts)


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Return a new id. Ids of one second sort by time: 7 bytes of it in microseconds, then 5 random ones."""
    return f"{prefix}{time.time_ns() // 1000:014x}{os.urandom(5).hex()}"


@dataclass(slots=True)
class NewFile:
    """A file that is being uploaded."""

    id: str
    tenant: str
    path: Path
    file: BinaryIO
    num_taken: int
    """Bytes of the folder that it has."""


class OpenBatches(NamedTuple):
    by_tenant: dict[str, list[BatchFacts]]
    """Batches that are not over, the oldest first."""
    full: dict[str, str]
    """Why the outputs of a tenant's batches may not grow."""


class FileStore:
    def __init__(self, config: BatchesConfig, folder: Path, num_tenants: int = 1) -> None:
        """`num_tenants`: how many share the folder."""
        self.config = config
        self._folder = folder
        self._bounds = Bounds(config.max_files, config.max_mb << 20, num_tenants)
        self._index = FolderIndex(folder)
        self._taking = threading.Lock()
        """Held between a look for room and the taking of it."""

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
        files = self._index.look().files.values()
        return _newest([file for file in files if tenant in (None, file.tenant) and file.expires_at > now_s])

    def batches(self, tenant: str | None) -> list[BatchFacts]:
        batches = self._index.look().batches.values()
        return _newest([batch for batch in batches if tenant in (None, batch.tenant)])

    def _read(self, name: str, kind: type[RecordT], prefix: str) -> RecordT | None:
        if not (name.startswith(prefix) and NAME.match(name)):
            return None
        try:
            return msgspec.json.decode(self.path(name, "json").read_bytes(), type=known(kind))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            return None  # of another version, or damaged from outside

    # ----------------------------------------------------------------------------------------------------------- files

    def create(self, tenant: str, num_bytes: int) -> NewFile:
        """Return a new file, with room for so many bytes. DiskFull if the folder has none. Makes the folder."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = new_id("file-")
        path = self.path(name, f"{tenant}.upload")
        with self._taking:
            self._make_room(tenant, 1, num_bytes)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = open(os.open(path, flags, 0o600), "wb")  # noqa: SIM115
            new = NewFile(name, tenant, path, file, num_bytes)
            try:
                os.ftruncate(new.file.fileno(), num_bytes)
            except OSError:
                self.discard(new)
                raise
            return new

    def append(self, new: NewFile, data: bytes) -> None:
        """Write more of a file. DiskFull or another OSError."""
        end = new.file.tell() + len(data)
        if end > new.num_taken:
            end += end // GROWTH
            with self._taking:
                self._make_room(new.tenant, 0, end - new.num_taken)
                os.ftruncate(new.file.fileno(), end)
            new.num_taken = end
        new.file.write(data)

    def keep(self, new: NewFile, record: FileRecord) -> None:
        """Make it a file."""
        new.file.flush()
        os.ftruncate(new.file.fileno(), record.num_bytes)
        os.fsync(new.file.fileno())
        new.file.close()
        with self._taking:  # without a record it is nobody's
            os.rename(new.path, self.path(new.id, "data"))
            self.write(record)

    def discard(self, new: NewFile) -> None:
        """Remove it, however far it has come."""
        with contextlib.suppress(OSError):  # what it still holds cannot be written
            new.file.close()
        new.path.unlink(missing_ok=True)
        self.remove(new.id)

    def note_read(self, name: str) -> None:
        """Note that the tenant of an output file has read it to the end."""
        if self.path(name, "data").exists():
            self.path(name, "read").touch(0o600)

    def _make_room(self, tenant: str, num_files: int, num_bytes: int) -> None:
        """Raise DiskFull if the tenant may not have so many more files and bytes, once what is past its use is
        removed."""
        room = room_for(self._index.look(), self._bounds, tenant, num_files, num_bytes)
        if room.refusal:
            raise DiskFull(room.refusal)
        self._remove_for(room)

    def _remove_for(self, room: Room) -> None:
        if room.removed:
            logger.warning("removed what is past its use, for something new: %s", ", ".join(room.removed))
        for name in room.removed:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a file or batch, its record first, so that nothing refers to what is gone."""
        for suffix in ("json", "data", "read", "input", "cancel", "reserve", "lock"):
            with contextlib.suppress(FileNotFoundError):
                self.path(name, suffix).unlink()

    # --------------------------------------------------------------------------------------------------------- batches

    def add(self, batch: BatchRecord) -> None:
        """Make a batch. DiskFull or another OSError, UnknownFile if there is no such input; then nothing is left."""
        with self._taking:
            self._make_room(batch.tenant, 1, RESERVE_BYTES)
            try:
                self._keep_input(batch)
                self.write(batch)
            except BaseException:
                self.remove(batch.id)
                raise

    def _keep_input(self, batch: BatchRecord) -> None:
        """Give the batch its input under a name of its own, so that the file may be deleted."""
        source, target = self.path(batch.input_file_id, "data"), self.path(batch.id, "input")
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise UnknownFile(f"there is no file {batch.input_file_id!r}") from None
        except OSError:  # a file system without links
            try:
                self._make_room(batch.tenant, 1, source.stat().st_size)
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

    def open_batches(self, running: set[str]) -> OpenBatches:
        """Return the batches that are not over. `running`: tenants with batches that run; if these have no room to
        grow, what is past its use is removed."""
        view = self._index.look()
        found = OpenBatches({}, {})
        for batch in reversed(_newest([batch for batch in view.batches.values() if not batch.is_over])):
            found.by_tenant.setdefault(batch.tenant, []).append(batch)
        for tenant in running:
            room = room_to_grow(view, self._bounds, tenant)
            if room.refusal:
                found.full[tenant] = room.refusal
            self._remove_for(room)
        return found

    def remove_old(self, now_s: float) -> None:
        """Remove what has expired, and contents without a record that are old."""
        view = self._index.look()
        for file in view.files.values():
            if file.expires_at <= now_s:
                self.remove(file.id)
        for batch in view.batches.values():
            if batch.is_over and batch.created_at + self.config.max_age_s <= now_s:
                self.remove(batch.id)
        for name, at_s in view.loose:
            if at_s < now_s - ORPHAN_S:
                (self._folder / name).unlink(missing_ok=True)


def _newest(records: list[ListedT]) -> list[ListedT]:
    return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)


def as_full(error: OSError) -> OSError | DiskFull:
    """Return DiskFull for an error that says so, else the error."""
    return DiskFull(f"the server's disk is full: {error.strerror}") if error.errno in FULL else error
