"""A launcher's own folder is made again if the temporary folder was cleaned while the launcher runs."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chitu.process.run_dir import Launched, RunDir, cluster_key_at, running_launchers

PORT, KEY = 21003, "a cluster key of some length"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def folder(temporary: Path) -> Iterator[RunDir]:
    folder = RunDir()
    folder.keep_key(PORT, KEY)
    yield folder
    folder.remove()


def test_a_process_gets_its_folder_after_the_temporary_folder_was_cleaned(temporary: Path, folder: RunDir) -> None:
    first = folder.make_empty("P0")
    shutil.rmtree(folder.path)
    assert folder.make_empty("P0") == first
    assert first.is_dir() and first.stat().st_mode & 0o777 == 0o700
    assert cluster_key_at(PORT) == KEY
    RunDir().remove()
    assert first.is_dir(), "the next launcher did not take it as abandoned"


def test_a_folder_that_a_process_of_this_launcher_has_made_again_is_locked_again(
    temporary: Path, folder: RunDir
) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir(mode=0o700)  # the router's supervisor has its own folder in it
    folder.make_empty("P0")
    assert cluster_key_at(PORT) == KEY


def test_a_folder_of_another_user_is_not_taken(
    temporary: Path, folder: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(OSError, match="belongs to another user"):
            folder.make_empty("P0")
    assert list(folder.path.iterdir()) == []


def test_commands_find_what_the_launchers_that_live_run(temporary: Path, folder: RunDir) -> None:
    assert running_launchers() == []
    own = Launched("http://127.0.0.1:21003", ("P0", "D0"), KEY)
    folder.keep_launched(own)
    killed = temporary / "chitu-run-killed"
    killed.mkdir()
    (killed / "launched.json").write_bytes((folder.path / "launched.json").read_bytes())
    (temporary / "chitu-run-broken").mkdir()
    assert running_launchers() == [own]
    assert (folder.path / "launched.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_on_a_file_system_without_locks_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS: the folder is not open for writing

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunDir()
    assert [path.name for path in temporary.iterdir()] == [folder.path.name]
    (folder.path / "P0").write_text("a file where a folder shall be")
    assert folder.make_empty("P0").is_dir()
    RunDir().remove()
    assert folder.path.is_dir(), "the next launcher did not take it as abandoned"
    folder.remove()
