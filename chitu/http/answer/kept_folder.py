"""The folder of kept requests (`router.kept_requests.dir`), which several routers may share. Blocking; in threads of a
router. Any router may be killed anywhere.

Beside the requests lie the files of their bodies, images above all, each once, under its SHA-256. A file that no
request names is removed when it is older than `UNNAMED_S`. A router that writes a request touches the files that are
there already, and looks once more when the request is in place: so none is missing that another router has just
removed.

Invariants: a file under its final name is complete (written aside, synced, renamed) and of mode 0600; files that this
user did not write are not read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from chitu.config.schema import KeptRequestsConfig
from chitu.protocol.kept_request import DamagedFile, KeptRequest, pack, unpack, with_files, without_files

logger = logging.getLogger(__name__)

SUFFIX = ".request"
FILE_SUFFIX = ".file"
"""Suffix of the files that requests name."""
UNNAMED_S = 120.0
"""Age at which a file that no request names is removed. A router that ends names what it writes sooner."""
ASIDE = (".partial", ".damaged", ".refused", ".taken")
"""Suffixes of files that no router reads; they are removed when they are old."""


class NotKept(Exception):
    """Why a request is not written, or its file not read."""


class KeptFolder:
    def __init__(self, config: KeptRequestsConfig, path: Path) -> None:
        self.config = config
        self._path = path
        self._max_bytes = config.max_mb << 20
        self._said: set[str] = set()
        """Names of files that were logged already."""

    def write(self, record: KeptRequest) -> None:
        """Write the request to a new file, and the files of its body. Raises NotKept or OSError."""
        bare, found = without_files(record)
        data, files = pack(bare), {digest + FILE_SUFFIX: content for digest, content in found.items()}
        try:
            self._write(data, files)
        except FileNotFoundError:  # a cleaner deleted the file, or the folder
            self._write(data, files)

    def _write(self, data: bytes, files: Mapping[str, bytes]) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = {entry.name: facts.st_size for entry, facts in self._files()}
        num_requests = sum(name.endswith(SUFFIX) for name in sizes)
        if num_requests >= self.config.max_requests:
            raise NotKept(f"the folder holds {num_requests} requests already (router.kept_requests.max_requests)")
        present = sum(size for name, size in sizes.items() if name.endswith((SUFFIX, FILE_SUFFIX)))
        new = len(data) + sum(len(content) for name, content in files.items() if name not in sizes)
        if present + new > self._max_bytes:
            raise NotKept(f"the folder has no room for {new} bytes more (router.kept_requests.max_mb)")
        for name, content in files.items():
            self._keep_file(name, content)
        self._put(secrets.token_hex(16) + SUFFIX, data)
        for name, content in files.items():
            self._keep_file(name, content)

    def _keep_file(self, name: str, content: bytes) -> None:
        """Write a file that requests name, or make the one that is there young."""
        path = self._path / name
        with contextlib.suppress(FileNotFoundError):
            if path.stat(follow_symlinks=False).st_size == len(content):
                os.utime(path, follow_symlinks=False)
                return
        self._put(name, content)

    def _put(self, name: str, data: bytes) -> None:
        path, partial = self._path / name, self._path / f"{secrets.token_hex(16)}.partial"
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def found(self, now_s: float, model_hash: str, dtype: str) -> list[tuple[str, KeptRequest]]:
        """Return names and requests that wait for a router of this model, at most `max_requests`, with bodies to be
        completed (`whole`). Removes old files and puts damaged ones aside; those of other models or users stay. Raises
        OSError."""
        found: list[tuple[str, KeptRequest]] = []
        entries = list(self._files())
        unnamed = {each.name for each, facts in entries if facts.st_mtime < now_s - UNNAMED_S}
        for entry, facts in entries:
            name = entry.name
            with contextlib.suppress(FileNotFoundError):  # another router took it
                if name.endswith(ASIDE) and facts.st_mtime < now_s - self.config.max_age_s:
                    os.unlink(entry.path)
                if not name.endswith(SUFFIX):
                    continue
                if len(found) >= self.config.max_requests:
                    unnamed.clear()  # it may name them
                    continue
                try:
                    record = unpack(self._read(name))
                except DamagedFile as error:
                    self.refuse(name, str(error), ".damaged")
                except (PermissionError, NotKept) as error:
                    self._say(name, f"is skipped: {error}")
                else:
                    unnamed.difference_update(each.sha256 + FILE_SUFFIX for each in record.files)
                    if record.expires_s < now_s:
                        os.unlink(entry.path)
                        logger.warning("kept request %s expired: no router continued it in time", record.request_id)
                    elif (record.model_hash, record.dtype) != (model_hash, dtype):
                        theirs, ours = f"{record.model_hash} {record.dtype}", f"{model_hash} {dtype}"
                        self._say(name, f"({record.request_id}) is skipped: it needs the model {theirs}, not {ours}")
                    else:
                        found.append((name, record))
        for name in unnamed:
            if name.endswith(FILE_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path / name)
        return found

    def whole(self, record: KeptRequest) -> KeptRequest:
        """Return the request with its whole body. Raises DamagedFile if a file that it names is not there any more or
        cannot be read, or OSError."""
        found: dict[str, bytes] = {}
        for digest in {each.sha256 for each in record.files}:
            try:
                found[digest] = self._read(digest + FILE_SUFFIX)
            except FileNotFoundError:
                raise DamagedFile(f"its file {digest} is gone") from None
            except NotKept as error:
                raise DamagedFile(f"its file {digest}: {error}") from None
        return with_files(record, found)

    def take(self, name: str) -> bool:
        """Take a file and return whether it is this router's: if several try, one succeeds. Raises OSError."""
        taken = self._path / f"{name}.{secrets.token_hex(8)}.taken"
        is_ours = True
        try:
            os.rename(self._path / name, taken)
        except FileNotFoundError:
            is_ours = taken.exists()  # a network file system may repeat a rename that was done
        with contextlib.suppress(OSError):
            taken.unlink()
        return is_ours

    def refuse(self, name: str, reason: str, suffix: str = ".refused") -> None:
        """Put a file aside, where operators may look at it."""
        aside = name + suffix
        if (self._path / aside).is_dir():  # somebody else's
            aside = f"{name}.{secrets.token_hex(8)}{suffix}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path / name, self._path / aside)
            logger.error("kept request in %s: refused, and put aside as %s: %s", self._path / name, aside, reason)

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """Yield the regular files. Anything else is not a router's, and left alone."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another router took it
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode):
                        yield entry, facts
                    elif entry.name.endswith(SUFFIX):
                        self._say(entry.name, "is skipped: it is no regular file")

    def _read(self, name: str) -> bytes:
        """Return a file's content. NotKept if it is not a file of this user, DamagedFile if it is too large."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path / name, flags)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise NotKept(f"it cannot be read: {error.strerror}") from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                raise NotKept("it is not a regular file of this user that no other user can write")
            if facts.st_size > self._max_bytes:
                raise DamagedFile(f"{facts.st_size} bytes")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(self._max_bytes)
        finally:
            os.close(descriptor)

    def _say(self, name: str, text: str) -> None:
        if name not in self._said and len(self._said) < self.config.max_requests:
            self._said.add(name)
            logger.warning("the file %s of kept requests %s", self._path / name, text)
