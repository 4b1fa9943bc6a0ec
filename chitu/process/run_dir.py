"""A launcher's own folder (0700) in the temporary folder, which holds the files of its processes and is removed with
them.

Owned by `Supervisor`; one thread. Each child has its TMPDIR in it. The launcher keeps the folder locked while it lives,
so after a kill -9 the next launcher of the same user can tell abandoned folders, and removes them. Commands of the same
user find there the cluster key, under the router's HTTP port, and what the launcher runs (`chitu drain --self`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from chitu.known_types import known

PREFIX = "chitu-run-"
LAUNCHED = "launched.json"


class Launched(msgspec.Struct, frozen=True):
    """Instances of a launcher."""

    url: str
    """URL of the router's API."""
    instances: tuple[str, ...]
    """Names of its instances; empty if it runs the router alone."""
    cluster_key: str = ""


class RunDir:
    """A launcher's folder, made and locked at construction."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        for path, is_abandoned in _own_folders():
            if is_abandoned:
                shutil.rmtree(path, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Until it is locked, another launcher that starts may take it as abandoned.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                _lock(self._lock)
                if self.path.exists():
                    return
                os.close(self._lock)

    def make_empty(self, name: str) -> Path:
        """Return the TMPDIR of a starting process, without files of its predecessor."""
        if not self._exists():  # the temporary folder was cleaned
            self._make_again()
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file, or a link
            path.unlink()
        path.mkdir(mode=0o700)
        return path

    def keep_key(self, port: int, cluster_key: str) -> None:
        """Store the key for `cluster_key_at`. `port` is the router's HTTP port."""
        self.keep(f"key-{port}", cluster_key)

    def keep_launched(self, launched: Launched) -> None:
        """Store what this launcher runs, for `running_launchers`."""
        self.keep(LAUNCHED, msgspec.json.encode(launched).decode())

    def keep(self, name: str, text: str) -> Path:
        """Write a file that only this user can read, and return its path."""
        self._files[name] = text
        path = self.path / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _exists(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _make_again(self) -> None:
        """Make the folder and its files at the same path, which running processes know. Raises OSError if another user
        has made it meanwhile."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a launcher below this one may have made it
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise PermissionError(f"{self.path} belongs to another user")
        os.close(self._lock)
        self._lock = descriptor
        _lock(descriptor)
        for name, text in self._files.items():
            self.keep(name, text)


def cluster_key_at(port: int) -> str:
    """Return the key of this user's cluster on this machine whose router has this HTTP port, or "" if none is known."""
    for path, is_abandoned in _own_folders():
        with contextlib.suppress(OSError):
            if not is_abandoned:
                return (path / f"key-{port}").read_text(encoding="utf-8")
    return ""


def running_launchers() -> list[Launched]:
    """Return what the launchers of this user on this machine (or in this container) run."""
    found = []
    for path, is_abandoned in _own_folders():
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if not is_abandoned:
                found.append(msgspec.json.decode((path / LAUNCHED).read_bytes(), type=known(Launched)))
    return found


def _own_folders() -> Iterator[tuple[Path, bool]]:
    """Yield this user's folders, each with whether its launcher is gone; that is valid until the next one."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    yield path, _take_lock(descriptor)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a folder, unless its file system has no locks (NFS): there no launcher removes the folders of others."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _take_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
