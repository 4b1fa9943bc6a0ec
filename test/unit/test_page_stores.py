"""Places of pages behind the pool: the disk, host memory, and the parts between them."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_scenarios import got, key_of, put, record_of
from support.clock import FakeClock
from tiered_world import Engine, Tiered

from chitu import lock_files
from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.disk_pages import FLUSH_S, DiskPages
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import page_content_bytes
from chitu.kv_cache.tiers.pages import HEADER_BYTES, MEMORY_S, MeasuredSpeed, is_whole, seal
from chitu.kv_cache.tiers.prefix_tiers import build_tiers

# ----------------------------------------------------------------------------------------------------------------------
# Pages on disk: bounded, shared between instances, and never read from a torn file.


def test_files_are_bounded_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 300)
    put(disk, 1, 2, 3)
    disk.touch([key_of(1), key_of(2)])
    put(disk, 4)
    assert [disk.may_have(key_of(number)) for number in (1, 2, 3, 4)] == [True, True, False, True]
    put(disk, 5)
    assert [disk.may_have(key_of(number)) for number in (1, 2, 4, 5)] == [True, False, True, True]
    assert disk.num_bytes == 300 and len(list(tmp_path.iterdir())) == 3
    disk.store_put([key_of(6)], [record_of(6, 301)])
    assert not disk.may_have(key_of(6)) and len(disk) == 3
    disk.close()
    smaller = DiskPages(tmp_path, 250)
    assert len(smaller) == 2 and smaller.num_bytes == 200


def test_instances_read_each_others_files_and_write_to_their_own(tmp_path: Path) -> None:
    mine = DiskPages(tmp_path / "P0", 1000, tmp_path)
    other = DiskPages(tmp_path / "D0", 200, tmp_path)  # starts later
    put(other, 1, 2)
    assert mine.may_have(key_of(1)) and got(mine, 1, 2, 3) == 2
    put(mine, 3)
    assert got(mine, 1, 2, 3) == 3 and got(mine, 3, 4) == 1
    assert len(mine) == 1 and mine.num_bytes == 100
    os.truncate(tmp_path / "D0" / f"{key_of(2).hex()}.kv", 99)
    assert got(mine, 1, 2) == 1
    mine.forget(key_of(1))  # the file did not hold the page of this key
    assert got(mine, 1) == 0 and got(other, 1) == 0
    mine.clear()
    assert (tmp_path / "D0" / f"{key_of(2).hex()}.kv").exists()
    (tmp_path / "D0").rename(tmp_path / "D1")
    assert got(mine, 3) == 0
    (tmp_path / "file").write_text("mine")
    put(mine, 5)
    assert got(mine, 5) == 1


def test_after_a_flush_no_page_of_another_instance_from_before_comes_back(tmp_path: Path) -> None:
    """The other one has not heard of it yet, or is gone; what it writes until it has may be as wrong."""
    mine, other = DiskPages(tmp_path / "P0", 1000, tmp_path), DiskPages(tmp_path / "D0", 1000, tmp_path)
    put(other, 1, 2)
    assert got(mine, 1) == 1
    mine.clear()
    put(other, 3)
    assert got(mine, 1) == got(mine, 2) == got(mine, 3) == 0 and got(other, 1, 2, 3) == 3
    other.clear()
    put(other, 1)
    path = tmp_path / "D0" / f"{key_of(1).hex()}.kv"
    os.utime(path, (time.time(), path.stat().st_mtime + FLUSH_S + 1))
    assert got(mine, 1) == 1
    put(mine, 2)
    assert got(mine, 2) == 1, "its own are from after the flush"


def test_torn_lost_and_foreign_files(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 1000)
    put(disk, 1, 2, 3, 4)
    (tmp_path / f"{key_of(2).hex()}.kv").unlink()
    assert got(disk, 1, 2, 3) == 1 and not disk.may_have(key_of(2))
    os.truncate(tmp_path / f"{key_of(3).hex()}.kv", 99)
    assert got(disk, 3) == 0 and got(disk, 4) == 1 and disk.num_bytes == 200
    (tmp_path / f"{key_of(5).hex()}.kv.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "abc.kv").write_text("mine")
    disk.close()
    again = DiskPages(tmp_path, 1000)
    assert len(again) == 2 and {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "abc.kv",
        *(f"{key_of(number).hex()}.kv" for number in (1, 4)),
    }


def make_odd(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        target = {"dangling link": "nothing", "link to itself": path.name, "link elsewhere": "/etc/hostname"}[kind]
        path.symlink_to(target)


ODD = ["directory", "fifo", "dangling link", "link to itself", "link elsewhere"]


@pytest.mark.parametrize("kind", ODD)
def test_odd_entries_are_left_alone_and_harm_nothing(kind: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "P0", tmp_path / "D0"
    for folder in (mine, other):
        folder.mkdir()
        make_odd(folder / f"{key_of(1).hex()}.kv", kind)
    make_odd(mine / f"{key_of(2).hex()}.kv.tmp", kind)
    make_odd(mine / "x.kv.tmp", kind)
    make_odd(tmp_path / "P0.lock", kind)
    make_odd(tmp_path / "odd", kind)
    disk = DiskPages(mine, 300, tmp_path)
    assert len(disk) == 0 and disk.num_bytes == 0 and got(disk, 1) == 0
    put(disk, 2, 3)
    assert got(disk, 2, 3) == 2 and got(disk, 1) == 0
    disk.forget(key_of(1))
    put(disk, 1)  # a page takes the place of everything but a folder
    assert got(disk, 1) == (kind != "directory")
    put(disk, 4, 5)
    make_odd(mine / f"{key_of(6).hex()}.kv", kind)
    (mine / f"{key_of(5).hex()}.kv").unlink()
    make_odd(mine / f"{key_of(5).hex()}.kv", kind)
    assert got(disk, 4) == 1 and got(disk, 5) == 0
    disk.clear()
    assert len(disk) == disk.num_bytes == 0 and os.path.lexists(mine / "x.kv.tmp")


def test_a_cleaner_may_delete_anything_while_it_starts_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "P0"
    before = DiskPages(folder, 1000, folder.parent)
    put(before, 1, 2)
    before.close()
    (folder / f"{key_of(3).hex()}.kv.tmp").write_bytes(b"half")
    really_scan, really_open, deletes = os.scandir, open, [folder / f"{key_of(1).hex()}.kv", folder]

    def scan_and_delete(path: Any = ".") -> Any:
        with really_scan(path) as entries:
            listed = list(entries)
        if path == folder and deletes:
            victim = deletes.pop()
            shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
        return contextlib.nullcontext(iter(listed)) if listed else really_scan(path)

    monkeypatch.setattr(os, "scandir", scan_and_delete)
    disk = DiskPages(folder, 1000, folder.parent)
    assert len(disk) == 0, "the folder was deleted while it was searched"
    put(disk, 1, 2)
    disk.close()
    again = DiskPages(folder, 1000, folder.parent)
    assert not deletes and len(again) == 1 and got(again, 2) == 1

    def open_and_delete(path: Any, mode: str = "r", **options: Any) -> Any:
        file = really_open(path, mode, **options)
        os.unlink(path)
        return file

    monkeypatch.setattr(builtins, "open", open_and_delete)
    put(again, 4)
    monkeypatch.setattr(builtins, "open", really_open)
    assert len(again) == 1 and got(again, 4) == 0
    put(again, 4)
    assert got(again, 2, 4) == 2


class OtherProcess:
    """Another cluster's instance of the same name: it has written page 9, and is writing page 8."""

    SCRIPT = """
import pathlib, sys
import disk_scenarios as t
shared = pathlib.Path(sys.argv[1])
disk = t.DiskPages(shared / "P0", 300, shared, patience_s=0.0)
t.put(disk, 9)
(disk._folder / f"{t.key_of(8).hex()}.kv.tmp").write_bytes(b"half")
print(disk._folder.name, flush=True)
sys.stdin.read()
"""

    def __init__(self, shared: Path) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        command = [sys.executable, "-c", self.SCRIPT, str(shared)]
        env = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout is not None
        self.folder = self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate()


def test_a_second_process_of_the_same_name_gets_a_folder_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = OtherProcess(tmp_path)
    assert first.folder == "P0"
    second = DiskPages(tmp_path / "P0", 200, tmp_path, patience_s=0.0)
    assert f"another process uses {tmp_path / 'P0'}" in caplog.text and str(tmp_path / "P0.1") in caplog.text
    assert (tmp_path / "P0" / f"{key_of(8).hex()}.kv.tmp").exists(), "the first one is still writing it"
    put(second, 1, 2, 3)
    assert got(second, 9) == 1 and got(second, 2, 3) == 2 and second.num_bytes == 200
    (tmp_path / "P0.1.lock").unlink()  # a cleaner; a third one takes the folder
    third = OtherProcess(tmp_path)
    assert third.folder == "P0.1"
    put(second, 4)
    assert (tmp_path / "P0.2" / f"{key_of(4).hex()}.kv").exists()
    assert (tmp_path / "P0.1" / f"{key_of(8).hex()}.kv.tmp").exists()
    first.end()
    third.end()
    again = DiskPages(tmp_path / "P0", 300, tmp_path, patience_s=0.0)
    assert got(again, 9) == 1 and not (tmp_path / "P0" / f"{key_of(8).hex()}.kv.tmp").exists()


def test_a_lock_file_that_another_host_deleted_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says so by ESTALE."""
    path = tmp_path / "P0.lock"
    with lock_files.claim(path) as file:
        assert lock_files.is_ours(file, path)

        def stale(_: int) -> os.stat_result:
            raise OSError(errno.ESTALE, "Stale file handle")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", stale)
            is_ours = lock_files.is_ours(file, path)
        assert not is_ours


def test_a_successor_waits_for_the_folder_of_a_process_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = OtherProcess(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: first.end())
    put(DiskPages(tmp_path / "P0", 300, tmp_path), 1)
    assert (tmp_path / "P0" / f"{key_of(1).hex()}.kv").exists() and not (tmp_path / "P0.1").exists()


def test_without_locks_a_folder_is_used_and_only_old_unfinished_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = tmp_path / "P0"
    folder.mkdir()
    new, old = (folder / f"{key_of(number).hex()}.kv.tmp" for number in (1, 2))
    new.touch()
    old.touch()
    os.utime(old, (0, 0))
    disk = DiskPages(folder, 300, tmp_path)
    put(disk, 1)
    assert got(disk, 1) == 1 and new.exists() and not old.exists()
    assert "a second process would not be detected: [Errno 37] No locks available" in caplog.text


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 1 << 30)
    put(disk, 1)
    record, limits = memoryview(bytes(1 << 22)), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            disk.store_put([key_of(2)], [record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not disk.may_have(key_of(2)) and disk.num_bytes == 100 and len(list(tmp_path.iterdir())) == 1


def test_on_a_full_disk_the_newest_pages_take_the_place_of_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskPages(tmp_path, 1 << 30)
    really_open, room = open, 40

    def open_on_small_disk(path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" in mode and len(list(tmp_path.iterdir())) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really_open(path, mode, **options)

    monkeypatch.setattr(builtins, "open", open_on_small_disk)
    put(disk, *range(41))
    assert len(disk) == 37 and not disk.may_have(key_of(3)) and got(disk, *range(4, 41)) == 37
    room = 20  # other files take what was deleted
    with pytest.raises(OSError, match="No space left"):
        put(disk, 41)
    assert len(disk) == 33 and got(disk, *range(8, 41)) == 33, "one attempt deletes few"
    disk.clear()
    room = 0
    with pytest.raises(OSError, match="No space left"):
        put(disk, 42)


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path / "cache" / "P0", 1000, tmp_path / "cache")
    put(disk, 1)
    shutil.rmtree(tmp_path / "cache")
    assert got(disk, 1) == 0
    put(disk, 2)
    assert got(disk, 2) == 1 and disk.num_bytes == 100


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache\.disk\.path"):
        DiskPages(tmp_path / "file" / "P0", 1000)


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "link to itself", "link through a file"])
def test_a_name_that_something_else_has_is_left_alone_and_the_next_one_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, file = tmp_path / "cache" / "P0", tmp_path / "file"
    path.parent.mkdir()
    file.write_text("kept")
    if kind == "file":
        path.write_text("kept")
    else:
        targets = {"link to a file": file, "link to nothing": tmp_path / "none", "link to itself": path}
        path.symlink_to(targets.get(kind, file / "below"))
    before = os.lstat(path)
    disk = DiskPages(path, 1000, path.parent)
    put(disk, 1)
    assert got(disk, 1) == 1 and (tmp_path / "cache" / "P0.1" / f"{key_of(1).hex()}.kv").exists()
    assert os.path.samestat(os.lstat(path), before) and file.read_text() == "kept"
    assert f"{path} is no folder; this process writes up to cache.disk.max_bytes to {path}.1" in caplog.text


def test_a_disk_that_autofs_unmounts_while_it_is_idle_is_mounted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autofs mounts what a path leads through (stat(2): AT_NO_AUTOMOUNT is implied for its last part)."""
    place, stat = tmp_path / "disk", os.stat
    mounted = {place}

    def mounting(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{place}/"):
            mounted.add(place)
        return stat(path, **options)

    monkeypatch.setattr(Path, "is_mount", lambda path: path in mounted)
    monkeypatch.setattr(os, "stat", mounting)
    disk = DiskPages(place / "P0", 1000)
    put(disk, 1)
    mounted.clear()
    assert got(disk, 1) == 1


@pytest.mark.parametrize("scenario", ["unmount_and_mount", "start_on_a_faulty_disk", "clear_a_faulty_disk"])
def test_while_its_disk_is_away_nothing_is_written_below_or_forgotten(scenario: str, tmp_path: Path) -> None:
    """The scenario runs in a mount namespace of its own."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces")
    script = f"import sys, pathlib, disk_scenarios; disk_scenarios.{scenario}(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [*unshare, sys.executable, "-c", script, tmp_path]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


# ----------------------------------------------------------------------------------------------------------------------
# The parts of tiers, each alone: pages of host memory, records, copies of pages, measured speed.


def host_of(num_slots: int) -> HostPages:
    return HostPages(memoryview(bytearray(num_slots * (HEADER_BYTES + 16) + 7)), 16)


def put_host(host: HostPages, *keys: bytes) -> None:
    for key in keys:
        taken = host.take()
        assert taken is not None and host.publish(key, taken)


def test_host_pages_give_up_the_least_recently_used_that_nobody_reads() -> None:
    host = host_of(3)
    put_host(host, b"a", b"b", b"c")
    pinned = host.pin(b"a")
    assert pinned is not None
    host.touch([b"b"])
    put_host(host, b"d")
    assert [key in host for key in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    assert (len(host), host.evictions, host.num_slots) == (3, 1, 3)
    others = [host.pin(key) for key in (b"b", b"d")]
    assert host.take() is None
    for slot in (pinned, *others):
        assert slot is not None
        host.unpin(slot)
    assert host.take() is not None


def test_host_pages_forget_all_and_what_is_filling_too() -> None:
    host = host_of(3)
    put_host(host, b"a", b"b")
    pinned, taken = host.pin(b"a"), host.take()
    assert pinned is not None and taken is not None
    host.clear()
    assert len(host) == 0 and host.pin(b"a") is None
    assert not host.publish(b"c", taken)
    free = [host.take() for _ in range(2)]
    assert None not in free and host.take() is None, "a slot that is read went to others"
    host.unpin(pinned)
    assert host.take() is not None


def test_a_key_is_kept_once() -> None:
    host = host_of(2)
    put_host(host, b"a")
    taken = host.take()
    assert taken is not None and not host.publish(b"a", taken)
    assert len(host) == 1 and host.take() is not None


@pytest.mark.parametrize("position", range(0, HEADER_BYTES + 16))
def test_a_changed_record_is_told_apart(position: int) -> None:
    key, record = bytes(range(16)), bytearray(HEADER_BYTES + 16)
    record[HEADER_BYTES:] = b"k and v of a pag"
    seal(memoryview(record), key)
    assert is_whole(memoryview(record), key) and not is_whole(memoryview(record), bytes(16))
    record[position] ^= 1
    is_padding = 36 <= position < HEADER_BYTES
    assert is_whole(memoryview(record), key) == is_padding


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + 15])
def test_a_record_that_was_cut_off_is_told_apart(length: int) -> None:
    record = bytearray(HEADER_BYTES + 16)
    seal(memoryview(record), bytes(16))
    assert not is_whole(memoryview(record)[:length], bytes(16))


def test_a_speed_is_that_of_the_last_measurements() -> None:
    clock = FakeClock()
    speed = MeasuredSpeed(clock)
    assert speed.per_s() is None
    for _ in range(20):
        speed.note(100, 1.0)
    for _ in range(20):
        speed.note(100, 10.0)
    measured = speed.per_s()
    assert measured is not None and measured == pytest.approx(10.0, rel=0.01)
    clock.advance(MEMORY_S)
    assert speed.per_s() is None


def test_memory_for_less_than_a_page_and_for_more_than_there_is_are_refused() -> None:
    instance = Tiered(16)
    assert isinstance(instance.executor, Engine)
    pool = instance.executor.pool
    page = HEADER_BYTES + page_content_bytes(pool.layout)

    def build(host_bytes: int, free_bytes: int) -> Sequence[object]:
        config = CacheConfig(host_bytes=host_bytes)
        return [
            build_tiers(
                config, "P0", "127.0.0.1", pool, "cpu", instance.cache, free_bytes, instance.clock, lambda: None
            )
        ]

    build(page, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page - 1}, less than one page of {page}"):
        build(page - 1, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page + 1}, but {page} bytes"):
        build(page + 1, page)
