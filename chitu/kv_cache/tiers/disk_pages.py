"""`DiskPages`: records in files of one folder, the least recently used deleted first, and those of other instances.

Called by the thread `tier-disk` alone, except `may_have`. It writes to its own folder, and deletes in others only files
that do not hold the page that their name says. A file is named by its page's key. It is written under another name and
then renamed, so a process that is killed leaves no partial record under a key. After a power cut a file may have lost
its content, so readers verify it. A file deleted by another process is a miss. Other kinds of files are left alone.
After a restart, a file counts as last used when it was written. While the disk has a fault, or is not mounted any more,
puts and gets fail: pages would fill the disk below it, and files that come back with it would not be counted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from chitu.errors import ConfigError
from chitu.kv_cache.page_keys import KEY_BYTES

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.kv")
_UNFINISHED = ".kv.tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FAULTS = (*_FULL, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk, also one that is elsewhere. Any other error at the start is one of the configuration."""
PARTS = 16
"""On a full disk one of so many parts of the files is deleted at once: other files need some of the room, too."""


class DiskPages:
    """The pages in `folder`, at most `max_bytes` of files, and no more than the disk has room for. It makes the folder,
    or finds what an earlier process left there. `shared` is its parent, in which the folders of other instances are
    read, too. Raises ConfigError if the folder cannot be written to, unless the disk has a fault: then each later call
    tries again."""

    def __init__(self, folder: Path, max_bytes: int, shared: Path | None = None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._shared = shared
        self._others: list[Path] = []
        """Folders of other instances, as of the last scan."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """File sizes in bytes by key, the least recently used first."""
        self.num_bytes = 0
        self._mount: Path | None = None
        """Mount point of the folder; None until the disk could be used."""
        self._must_clear = False
        try:
            self._require_disk()
        except OSError as error:
            if error.errno not in _FAULTS:
                raise ConfigError(f"cache.disk.path: {folder} cannot be used: {error.strerror}") from error
            logger.warning("the prefix cache starts without its disk: %s", error)

    def __len__(self) -> int:
        return len(self._sizes)

    def may_have(self, key: bytes) -> bool:
        return key in self._sizes or self._shared is not None

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        self._require_disk()
        self._folder.mkdir(parents=True, exist_ok=True)  # unless it was deleted, with all files
        for key, record in zip(keys, records, strict=True):
            if key in self._sizes or len(record) > self._max_bytes:
                continue
            self._make_room(len(record), self._max_bytes)
            try:
                self._write(key, record)
            except OSError as error:
                if error.errno not in _FULL or not self._sizes:
                    raise
                self._make_room(len(record) + self.num_bytes // PARTS, self.num_bytes)
                self._write(key, record)
            self._sizes[key] = len(record)
            self.num_bytes += len(record)

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        self._require_disk()
        self._look_for_others()
        for count, (key, record) in enumerate(zip(keys, records, strict=True)):
            if key in self._sizes:
                with suppress(FileNotFoundError):
                    if _read_whole(self._path(key), record):
                        continue
                self._delete(key)
            if not any(_read_other(folder / _name(key), record) for folder in self._others):
                return count
        return len(keys)

    def forget(self, key: bytes) -> None:
        self._delete(key)
        for folder in self._others:
            with suppress(FileNotFoundError, PermissionError):
                (folder / _name(key)).unlink()

    def _delete(self, key: bytes) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_bytes -= size
            with suppress(FileNotFoundError):
                self._path(key).unlink()

    def touch(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def clear(self) -> None:
        """Delete all pages; if the disk is away, before its next use."""
        self._must_clear = True
        self._require_disk()

    def close(self) -> None:
        """Do nothing: the files stay for the next process."""

    def _require_disk(self) -> None:
        """Raise OSError if the disk cannot be used now."""
        if self._mount is not None:
            os.stat(f"{self._mount}/.")  # what autofs has unmounted meanwhile, this mounts again; `is_mount` does not
            if not self._mount.is_mount():
                raise OSError(errno.ENODEV, "nothing is mounted there any more", str(self._mount))
        if self._mount is None or self._must_clear:  # to clear, find what an earlier try could not delete
            self._mount = self._open()
            self._make_room(*((1, 0) if self._must_clear else (0, self._max_bytes)))
            self._must_clear = False

    def _open(self) -> Path:
        """Make the folder, or find what is in it. Return its mount point."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            is_read_only = os.statvfs(self._folder).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if is_read_only else errno.EACCES, "it cannot be written to", str(self._folder))
        path = self._folder.resolve()
        mount = next(place for place in (path, *path.parents) if place.is_mount())
        self._find()
        return mount

    def _path(self, key: bytes) -> Path:
        return self._folder / _name(key)

    def _make_room(self, nbytes: int, max_bytes: int) -> None:
        while self._sizes and self.num_bytes + nbytes > max_bytes:
            self._delete(next(iter(self._sizes)))

    def _write(self, key: bytes, record: memoryview) -> None:
        unfinished = self._folder / (key.hex() + _UNFINISHED)
        try:
            with open(unfinished, "wb", buffering=0) as file:
                written = file.write(record)
                while written < len(record):
                    written += file.write(record[written:])
            unfinished.replace(self._path(key))
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def _look_for_others(self) -> None:
        if self._shared is not None:
            with suppress(FileNotFoundError), os.scandir(self._shared) as entries:
                self._others = [Path(entry) for entry in entries if entry.is_dir() and entry.name != self._folder.name]

    def _find(self) -> None:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_UNFINISHED):
                    os.unlink(entry.path)
                elif match := _NAME.fullmatch(entry.name):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, bytes.fromhex(match[1]), status.st_size))
        self._sizes = OrderedDict((key, size) for _, key, size in sorted(found))
        self.num_bytes = sum(self._sizes.values())


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"


def _read_other(path: Path, record: memoryview) -> bool:
    """Read a record of another instance. Return False also if the file is missing or not readable for this process."""
    try:
        return _read_whole(path, record)
    except (FileNotFoundError, PermissionError):
        return False


def _read_whole(path: Path, record: memoryview) -> bool:
    """Read a file into `record`. Return False if the file has another length."""
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != len(record):
            return False
        filled = 0
        while filled < len(record):
            count = os.readv(file.fileno(), [record[filled:]])
            if not count:
                return False
            filled += count
    return True
