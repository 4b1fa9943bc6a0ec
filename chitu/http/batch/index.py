"""What is in the folder of files and batches (`store.py`): records, sizes, whose they are. Any thread.

Each look lists the names in the folder, and reads only records that are new or have changed since the last one: that of
a file is written once, that of a batch changes until it is over. So a look is right however many routers write to the
folder, and beyond the names it costs what is new or moves.

Invariant: each byte of the folder is counted once, also if it has two names; it is its tenant's if that is known.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from chitu.known_types import known

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
    input_file_id: str
    output_file_id: str
    error_file_id: str

    @property
    def is_over(self) -> bool:
        return self.status in OVER


Tenant = str | None
"""Whose something is; None: nobody known."""


@dataclass(slots=True)
class FolderView:
    """One look into the folder."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    batches: dict[str, BatchFacts] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    """Size of each file, and of a batch without what moves."""
    held_files: Counter[Tenant] = field(default_factory=Counter)
    """Files, batches and uploads by tenant."""
    held_bytes: Counter[Tenant] = field(default_factory=Counter)
    read: set[str] = field(default_factory=set)
    """Ids of output files that their tenant has read to the end."""
    loose: list[tuple[str, float]] = field(default_factory=list)
    """Entries without a record, and their time; not the outputs of a batch that is not over."""


class FolderIndex:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._known = FolderView()
        """What does not move: records, and the contents of files."""
        self._owners: dict[str, Tenant] = {}
        """Of all records."""
        self._versions: dict[str, tuple[int, int, int]] = {}
        """Inode, time and size of records that may change: of open batches, and damaged ones."""
        self._moving: set[str] = set()
        """Entries whose size may change."""

    def look(self) -> FolderView:
        """Return what is in the folder now. Blocks. OSError."""
        with self._lock:
            try:
                names = set(os.listdir(self._folder))
            except FileNotFoundError:
                names = set()
            gone, new = self._names - names, names - self._names
            self._names = names
            for entry in gone:
                self._forget(entry)
            for entry in new:
                self._learn(entry)
            for name in list(self._versions):
                self._read(name)
            return self._view()

    def _learn(self, entry: str) -> None:
        name, _, suffix = entry.partition(".")
        if not NAME.match(name):
            self._moving.add(entry)
        elif suffix == "json":
            self._versions[name] = 0, 0, 0
        elif suffix == "read":
            self._known.read.add(name)
        elif suffix not in ("lock", "cancel"):  # these are empty
            self._moving.add(entry)

    def _forget(self, entry: str) -> None:
        self._moving.discard(entry)
        name, _, suffix = entry.partition(".")
        if suffix == "json" and NAME.match(name):
            self._versions.pop(name, None)
            self._weigh(name, None, None)
            self._known.batches.pop(name, None)
            content = f"{name}.data"
            if self._known.files.pop(name, None) is not None and content in self._names:
                self._moving.add(content)
        elif suffix == "read":
            self._known.read.discard(name)

    def _weigh(self, name: str, tenant: Tenant, num_bytes: int | None) -> None:
        """Count a record with what belongs to it; None: no more."""
        known = self._known
        if name in self._owners:
            owner = self._owners.pop(name)
            known.held_files[owner] -= 1
            known.held_bytes[owner] -= known.num_bytes.pop(name)
        if num_bytes is not None:
            self._owners[name], known.num_bytes[name] = tenant, num_bytes
            known.held_files[tenant] += 1
            known.held_bytes[tenant] += num_bytes

    def _read(self, name: str) -> None:
        """Read a record, if it is another than before."""
        path = self._folder / f"{name}.json"
        try:
            facts = path.stat()
            version = facts.st_ino, facts.st_mtime_ns, facts.st_size
            if self._versions[name] == version:
                return
            raw = path.read_bytes()
        except FileNotFoundError:
            self._names.discard(path.name)
            self._forget(path.name)
            return
        self._versions[name] = version
        try:
            if name.startswith("file-"):
                file = self._known.files[name] = msgspec.json.decode(raw, type=known(FileRecord))
                self._weigh(name, file.tenant, len(raw) + file.num_bytes)
                self._moving.discard(f"{name}.data")
                del self._versions[name]
            else:
                batch = self._known.batches[name] = msgspec.json.decode(raw, type=known(BatchFacts))
                self._weigh(name, batch.tenant, len(raw))
                if batch.is_over:
                    del self._versions[name]
        except msgspec.DecodeError:
            self._weigh(name, None, len(raw))  # of another version, or damaged from outside

    def _view(self) -> FolderView:
        known, moving = self._known, self._moving
        view = FolderView(
            *(known.files.copy(), known.batches.copy(), known.num_bytes.copy()),
            *(known.held_files.copy(), known.held_bytes.copy(), known.read.copy()),
        )
        owners = dict(self._owners)
        for batch in (known.batches[name] for name in self._versions if name in known.batches):
            owners |= dict.fromkeys((batch.output_file_id, batch.error_file_id), batch.tenant)
        inodes: set[int] = set()
        for entry in moving:
            name, _, suffix = entry.partition(".")
            try:
                facts = (self._folder / entry).lstat()
            except FileNotFoundError:
                continue
            owner = owners.get(name)
            if suffix.endswith(".upload"):
                owner = suffix.removesuffix(".upload")
                view.held_files[owner] += 1
            if NAME.match(name) and name not in owners:
                view.loose.append((entry, facts.st_mtime))
            if stat.S_ISDIR(facts.st_mode) or (facts.st_nlink > 1 and self._is_counted(entry, facts.st_ino, inodes)):
                continue
            view.held_bytes[owner] += facts.st_size
        return view

    def _is_counted(self, entry: str, inode: int, inodes: set[int]) -> bool:
        """Return whether the content of an entry with several names is counted by another of them."""
        name, _, suffix = entry.partition(".")
        batch = self._known.batches.get(name) if suffix == "input" else None
        if inode in inodes or (batch is not None and batch.input_file_id in self._known.files):
            return True
        inodes.add(inode)
        return False
