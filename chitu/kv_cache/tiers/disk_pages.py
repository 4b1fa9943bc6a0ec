"""`DiskPages`: records in files of one folder, the least recently used deleted first, and those of other instances.

Called by the thread `tier-disk` alone, except `may_have`. It writes to its own folder, and deletes in others only files
that do not hold the page that their name says. A lock file beside the folder says whose it is: a second process of the
same name, such as one of another cluster, gets a folder of its own. A file is named by its page's key. It is written
under another name and then renamed, so a process that is killed leaves no partial record under a key. After a power cut
a file may have lost its content, so readers verify it. Anybody may delete files and folders at any time: such a page is
a miss. Entries that are no regular files are left alone. After a restart, a file counts as last used when it was
written. While the disk has a fault, or is not mounted any more, puts and gets fail: pages would fill the disk below it,
and files that come back with it would not be counted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from chitu import lock_files
from chitu.errors import ConfigError
from chitu.kv_cache.prefix_index import KEY_BYTES

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.kv")
_UNFINISHED = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}(\.[0-9a-f]+)?\.kv\.tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FAULTS = (*_FULL, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk, also one that is elsewhere. Any other error at the start is one of the configuration."""
_GONE = (errno.ENOENT, errno.ESTALE, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)
"""Errors of one file that is no page (any more): another process has deleted it, or put something else there."""
TRIES = 5
"""Tries to make and search a folder that others delete meanwhile."""
MAX_FOLDERS = 16
"""Most processes of one name that share a path."""
PATIENCE_S = 3.0
"""Time in which a process that ends gives up its folder to its successor."""
FLUSH_S = 15.0
"""Time in which a flush reaches all instances: more than a lease, after which one that heard nothing is gone."""
UNFINISHED_S = 600.0
"""Where there are no locks, unfinished files of this age are deleted at the start."""
PARTS = 16
"""On a full disk one of so many parts of the files is deleted at once: other files need some of the room, too."""


class DiskPages:
    """The pages in `folder`, at most `max_bytes` of files, and no more than the disk has room for. It makes the folder,
    or finds what an earlier process left there. If another process has the folder for longer than `patience_s`, or if
    something else has its name, it is the next free one of FOLDER.1, FOLDER.2, ... `shared` is the parent, in which the
    folders of other instances are read, too. Raises ConfigError if the folder cannot be written to, unless the disk has
    a fault: then each later call tries again."""

    def __init__(
        self, folder: Path, max_bytes: int, shared: Path | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._named = self._folder = folder
        """The folder by the instance's name, and the one that is used."""
        self._max_bytes = max_bytes
        self._shared = shared
        self._others: list[Path] = []
        """Folders of other instances, as of the last scan."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """File sizes in bytes by key, the least recently used first."""
        self.num_bytes = 0
        self._mount: Path | None = None
        """Mount point of the folder; None until the disk could be used."""
        self._lock: BinaryIO | None = None
        """The folder's lock file; None where there are no locks."""
        self._writer = secrets.token_hex(4)
        """Part of the names of unfinished files, which no other process writes."""
        self._must_clear = False
        self._others_since_ns = 0
        """Pages of others that were written before are not read: they may be from before the last flush."""
        try:
            self._require_disk(patience_s)
        except OSError as error:
            if error.errno not in (*_FAULTS, errno.ENOENT):
                raise ConfigError(f"cache.disk.path: {folder} cannot be used: {error.strerror}") from error
            logger.warning("the prefix cache starts without its disk: %s", error)

    def __len__(self) -> int:
        return len(self._sizes)

    def may_have(self, key: bytes) -> bool:
        return key in self._sizes or self._shared is not None

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        self._require_disk()
        for key, record in zip(keys, records, strict=True):
            if key in self._sizes or len(record) > self._max_bytes:
                continue
            self._make_room(len(record), self._max_bytes)
            try:
                is_written = self._write(key, record)
            except OSError as error:
                if error.errno not in _FULL or not self._sizes:
                    raise
                self._make_room(len(record) + self.num_bytes // PARTS, self.num_bytes)
                is_written = self._write(key, record)
            if is_written:
                self._sizes[key] = len(record)
                self.num_bytes += len(record)

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        self._require_disk()
        self._look_for_others()
        for count, (key, record) in enumerate(zip(keys, records, strict=True)):
            if key in self._sizes:
                if _read_whole(self._path(key), record):
                    continue
                self._delete(key)
            since_ns = self._others_since_ns
            if not any(_read_whole(folder / _name(key), record, since_ns) for folder in self._others):
                return count
        return len(keys)

    def forget(self, key: bytes) -> None:
        self._delete(key)
        for folder in self._others:
            _unlink(folder / _name(key))

    def _delete(self, key: bytes) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_bytes -= size
            _unlink(self._path(key))

    def touch(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def clear(self) -> None:
        """Delete all pages; if the disk is away, before its next use. Pages that others have from before, or write
        before they hear of the flush, are not read any more."""
        self._must_clear = True
        self._require_disk()

    def close(self) -> None:
        """Give up the folder. Its files stay for the next process."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _require_disk(self, patience_s: float = 0.0) -> None:
        """Raise OSError if the disk cannot be used now."""
        if self._mount is not None:
            os.stat(f"{self._mount}/.")  # what autofs has unmounted meanwhile, this mounts again; `is_mount` does not
            if not self._mount.is_mount():
                raise OSError(errno.ENODEV, "nothing is mounted there any more", str(self._mount))
        if self._mount is not None and not self._is_ours():
            self._mount = None
        if self._mount is None or self._must_clear:  # to clear, find what an earlier try could not delete
            self._mount = self._open(patience_s)
            self._make_room(*((1, 0) if self._must_clear else (0, self._max_bytes)))
            if self._must_clear:
                os.utime(self._folder)  # now, by the clock of the disk
                self._others_since_ns = os.stat(self._folder).st_mtime_ns + int(FLUSH_S * 1e9)
            self._must_clear = False

    def _open(self, patience_s: float) -> Path:
        """Make the folder, or read its contents. Return its mount point."""
        for tries_left in reversed(range(TRIES)):
            try:
                self._claim(patience_s)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._require_writable()
                path = self._folder.resolve()
                self._find()
                return next(place for place in (path, *path.parents) if place.is_mount())
            except FileNotFoundError:  # it was deleted meanwhile
                if not tries_left:
                    raise
        raise AssertionError

    def _require_writable(self) -> None:
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            is_read_only = os.statvfs(self._folder).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if is_read_only else errno.EACCES, "it cannot be written to", str(self._folder))

    def _is_ours(self) -> bool:
        return self._lock is None or lock_files.is_ours(self._lock, _lock_of(self._folder))

    def _claim(self, patience_s: float) -> None:
        """Take the first folder that no other process has and whose name nothing else has."""
        if self._lock is not None and self._is_ours():
            return
        self.close()
        self._named.parent.mkdir(parents=True, exist_ok=True)
        end_s = time.monotonic() + patience_s
        while True:
            for number in range(MAX_FOLDERS):
                self._folder = self._named.with_name(f"{self._named.name}.{number}") if number else self._named
                if _is_something_else(self._folder):
                    continue
                try:
                    self._lock = lock_files.claim(_lock_of(self._folder), 0o666)
                except BlockingIOError:
                    if time.monotonic() < end_s:  # its process may be ending
                        break
                    continue
                except FileNotFoundError:  # the folder around it was deleted
                    raise
                except OSError as error:  # such as a file system without locks
                    logger.warning(
                        "%s: cannot be locked, so a second process would not be detected: %s", self._folder, error
                    )
                if number:
                    text = "%s is no folder" if _is_something_else(self._named) else "another process uses %s"
                    logger.warning(
                        f"cache.disk.path: {text}; this process writes up to cache.disk.max_bytes to %s",
                        self._named,
                        self._folder,
                    )
                return
            else:
                raise OSError(
                    errno.EBUSY, f"other processes or files use it and {MAX_FOLDERS - 1} more", str(self._named)
                )
            time.sleep(0.05)

    def _path(self, key: bytes) -> Path:
        return self._folder / _name(key)

    def _make_room(self, nbytes: int, max_bytes: int) -> None:
        while self._sizes and self.num_bytes + nbytes > max_bytes:
            self._delete(next(iter(self._sizes)))

    def _write(self, key: bytes, record: memoryview) -> bool:
        """Write a page. Return False if its file or folder is not there any more, or cannot have this name."""
        unfinished = self._folder / f"{key.hex()}.{self._writer}.kv.tmp"
        try:
            self._folder.mkdir(exist_ok=True)  # unless it was deleted, with all files
            with open(unfinished, "wb", buffering=0) as file:
                written = file.write(record)
                while written < len(record):
                    written += file.write(record[written:])
            unfinished.replace(self._path(key))
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            if error.errno in (errno.ENOENT, errno.EISDIR):
                return False
            raise
        return True

    def _look_for_others(self) -> None:
        if self._shared is not None:
            with suppress(FileNotFoundError), os.scandir(self._shared) as entries:
                self._others = [Path(entry) for entry in entries if entry.name != self._folder.name and _is_dir(entry)]

    def _find(self) -> None:
        self._sizes = OrderedDict((key, size) for _, key, size in sorted(self._found()))
        self.num_bytes = sum(self._sizes.values())

    def _found(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield time of writing, key and size of each page; delete unfinished files."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                page = _NAME.fullmatch(entry.name)
                if page is None and not _UNFINISHED.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if page is not None:
                        yield status.st_mtime_ns, bytes.fromhex(page[1]), status.st_size
                    elif self._lock is not None or status.st_mtime < time.time() - UNFINISHED_S:
                        _unlink(Path(entry))


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _is_something_else(path: Path) -> bool:
    """Return whether there is something that is no folder: a file, or a link to one, to nothing or to itself."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return path.is_symlink()
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return True


def _is_dir(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # such as a link to itself
        return entry.is_dir()
    return False


def _unlink(path: Path) -> None:
    """Delete a file, unless it is gone, or not ours to delete."""
    try:
        path.unlink()
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _read_whole(path: Path, record: memoryview, since_ns: int = 0) -> bool:
    """Read a file into `record`. Return False if there is no regular file of that length, written since then, that this
    process can read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(record) or status.st_mtime_ns < since_ns:
            return False
        filled = 0
        while filled < len(record):
            count = os.readv(file, [record[filled:]])
            if not count:
                return False
            filled += count
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    finally:
        os.close(file)
    return True
