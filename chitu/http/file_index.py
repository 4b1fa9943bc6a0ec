"""What is in the folder of files and batches (`file_store.py`): records, sizes, whose they are. Any thread.

Each look lists the folder, and reads only the records that are new or may have changed since the last one: that of a
file is written once, that of a batch changes until it is over, and every write gives it another inode. So a look is
right however many routers write to the folder, and its cost in opened files is that of the news.

Invariant: each byte of the folder is counted once, also if it has two names; it is its tenant's if that is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

NAME = re.compile(r"(file-|batch_)[0-9a-f]{24}\Z")
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


class BatchFacts(msgspec.Struct, frozen=True):
    """What lists need of the record of a batch (`BatchRecord`); the rest of it may be large."""

    id: str
    tenant: str
    status: BatchStatus
    created_at: int
    output_file_id: str
    error_file_id: str

    @property
    def is_over(self) -> bool:
        return self.status in OVER


class _Known(NamedTuple):
    version: tuple[int, int, int]
    """Inode, time and size of its file."""
    record: FileRecord | BatchFacts | None
    """None: of another version, or damaged from outside."""

    def may_change(self) -> bool:
        return not (isinstance(self.record, FileRecord) or (self.record is not None and self.record.is_over))


@dataclass(slots=True)
class FolderView:
    """One look into the folder. A tenant of None is nobody known."""

    files: list[FileRecord] = field(default_factory=list)
    batches: list[BatchFacts] = field(default_factory=list)
    """Each the oldest first."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by the name of their file or batch, or else of the entry."""
    owners: dict[str, str | None] = field(default_factory=dict)
    """Tenants of these names."""
    counted: set[str] = field(default_factory=set)
    """Names that count as a file or batch: those with a record, and uploads."""
    read: set[str] = field(default_factory=set)
    """Names of output files that their tenant has read to the end."""
    loose: list[tuple[str, float]] = field(default_factory=list)
    """Entries without a record, and their time; not those of a batch that is not over."""

    def held(self) -> dict[str | None, tuple[int, int]]:
        """Return how many files and batches, and bytes, each tenant has."""
        files: Counter[str | None] = Counter()
        num_bytes: Counter[str | None] = Counter()
        for name, owner in self.owners.items():
            files[owner] += name in self.counted
            num_bytes[owner] += self.num_bytes[name]
        return {owner: (files[owner], num_bytes[owner]) for owner in num_bytes}


class FolderIndex:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def look(self) -> FolderView:
        """Return what is in the folder now. Blocks. OSError."""
        with self._lock:
            others: list[os.DirEntry[str]] = []
            known: dict[str, _Known] = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
                for entry in entries:
                    name, _, suffix = entry.name.partition(".")
                    if suffix != "json" or not NAME.match(name):
                        others.append(entry)
                    elif (found := self._record(name, entry)) is not None:
                        known[name] = found
            self._known = known
        return _view_of(known, others)

    def _record(self, name: str, entry: os.DirEntry[str]) -> _Known | None:
        """Return a record; None if it was removed just now."""
        known = self._known.get(name)
        if known is not None and known.version[0] == entry.inode() and not known.may_change():
            return known
        try:
            facts = entry.stat(follow_symlinks=False)
            version = facts.st_ino, facts.st_mtime_ns, facts.st_size
            if known is not None and known.version == version:
                return known
            raw = Path(entry.path).read_bytes()
        except FileNotFoundError:
            return None
        kind: type[FileRecord] | type[BatchFacts] = FileRecord if name.startswith("file-") else BatchFacts
        try:
            return _Known(version, msgspec.json.decode(raw, type=kind))
        except msgspec.DecodeError:
            return _Known(version, None)


def _view_of(known: dict[str, _Known], others: list[os.DirEntry[str]]) -> FolderView:
    view = FolderView()
    outputs: dict[str, str] = {}
    """Tenants of the outputs of batches that are not over."""
    for name, (version, record) in known.items():
        view.num_bytes[name], view.owners[name] = version[2], record.tenant if record is not None else None
        view.counted.add(name)
        if isinstance(record, FileRecord):
            view.files.append(record)
        elif record is not None:
            view.batches.append(record)
            if not record.is_over:
                outputs |= dict.fromkeys((record.output_file_id, record.error_file_id), record.tenant)
    inodes: set[int] = set()
    for entry in sorted(others, key=lambda entry: not entry.name.endswith(".data")):  # a batch's input may be its link
        name, _, suffix = entry.name.partition(".")
        is_named = NAME.match(name) is not None
        record = known[name].record if name in known else None
        if suffix == "data" and isinstance(record, FileRecord):
            num_bytes = record.num_bytes  # it does not change any more
        else:
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            num_bytes = 0 if entry.is_dir(follow_symlinks=False) else facts.st_size
            if is_named and name not in known and name not in outputs:
                view.loose.append((entry.name, facts.st_mtime))
        name = name if is_named else entry.name
        if suffix == "read":
            view.read.add(name)
        if entry.inode() not in inodes:
            inodes.add(entry.inode())
            view.num_bytes[name] += num_bytes
        if name not in view.owners:
            tenant, _, kind = suffix.rpartition(".")
            is_upload = kind == "upload"
            view.owners[name] = tenant if is_upload else outputs.get(name)
            if is_upload:
                view.counted.add(name)
    view.files.sort(key=lambda file: (file.created_at, file.id))
    view.batches.sort(key=lambda batch: (batch.created_at, batch.id))
    return view
