"""What tests of pages on disk share with the processes that they start, which import no torch: it takes seconds of a
core. Scenarios run in a mount namespace of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from chitu.kv_cache.tiers.disk_pages import DiskPages


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record_of(number: int, nbytes: int = 100) -> memoryview:
    return memoryview(bytes([number]) * nbytes)


def put(disk: DiskPages, *numbers: int) -> None:
    disk.store_put([key_of(number) for number in numbers], [record_of(number) for number in numbers])


def got(disk: DiskPages, *numbers: int) -> int:
    records = [memoryview(bytearray(100)) for _ in numbers]
    count = disk.store_get([key_of(number) for number in numbers], records)
    assert [bytes(record) for record in records[:count]] == [bytes(record_of(number)) for number in numbers[:count]]
    return count


def unmount_and_mount(root: Path) -> None:
    disk_of, place = root / "disk", root / "place"
    for folder in (disk_of, place):
        folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk_of], check=True)
    subprocess.run(["mount", "--bind", disk_of, place], check=True)
    disk = DiskPages(place / "P0", 1000, place)
    put(disk, 1, 2)
    subprocess.run(["umount", "--lazy", place], check=True)
    for call in (put, got):
        with pytest.raises(OSError, match="nothing is mounted there any more"):
            call(disk, 1, 3)
    assert not list(place.iterdir()), "below it"
    subprocess.run(["mount", "--bind", disk_of, place], check=True)
    assert got(disk, 1, 2, 3) == 2 and disk.num_bytes == 200
    subprocess.run(["umount", "--lazy", place], check=True)
    with pytest.raises(OSError, match="nothing is mounted there any more"):
        disk.clear()
    subprocess.run(["mount", "--bind", disk_of, place], check=True)
    assert got(disk, 1) == 0 and not list((place / "P0").iterdir()), "it was told to forget them"


def start_on_a_faulty_disk(root: Path) -> None:
    """Start on a disk that an error has made read-only."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    before = DiskPages(root / "P0", 1000, root)
    put(before, 1, 2)
    before.close()
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    again, new = DiskPages(root / "P0", 1000, root), DiskPages(root / "P1", 1000, root)
    for disk in (again, new):
        with pytest.raises(OSError):
            put(disk, 3)
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    put(again, 3)
    assert got(again, 1, 2, 3) == 3 and again.num_bytes == 300 and got(new, 1, 2) == 2


def clear_a_faulty_disk(root: Path) -> None:
    """Flush while the disk is read-only: it is finished once it can be written, before another process reads them."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    disk = DiskPages(root / "P0", 1000, root)
    put(disk, 1, 2)
    (root / "P0" / f"{key_of(3).hex()}.kv").touch()  # a power cut has emptied it
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    for _ in range(3):
        with pytest.raises(OSError):
            disk.clear()
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    assert got(disk, 1) == 0 and len(disk) == disk.num_bytes == 0 and not list((root / "P0").iterdir())
    put(disk, 1)
    shutil.rmtree(root / "P0")
    disk.clear()
    assert got(disk, 1) == 0
