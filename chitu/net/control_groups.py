"""What control groups leave this process: memory that it may still allocate, and CPU cores that it may use.

Containers, pods and Slurm jobs limit their processes by control groups (cgroups); neither /proc/meminfo nor the list of
CPUs shows these limits. Both versions of the interface are read. A limit holds if any group sets it, from the process's
own group up to the top of the mounted hierarchy. A file that is missing or unreadable sets no limit. Any thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number beyond this if a group has no memory limit."""
ROOT = Path("/")


def memory_left_bytes(root: Path = ROOT) -> int | None:
    """Return how many bytes this process may still allocate, or None without a limit. Page cache that the kernel gives
    up first counts as free, as it does in MemAvailable."""
    left: list[int] = []
    for group in _groups(root, "memory"):
        v2 = [_number(group / name) for name in ("memory.max", "memory.high")]
        v1 = _number(group / "memory.limit_in_bytes")
        limits = [limit for limit in (*v2, v1) if limit is not None and limit < NO_LIMIT_BYTES]
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        if limits:
            left.append(max(0, min(limits) - used + _inactive_file_bytes(group)))
    return min(left, default=None)


def usable_cores(root: Path = ROOT) -> int:
    """Return how many CPU cores this process can keep busy: those of its affinity mask, or fewer with a CPU quota. At
    least 1."""
    cores = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root, "cpu"):
        quota_us, period_us = _cpu_max(group)
        if quota_us > 0 and period_us > 0:
            cores.append(quota_us / period_us)
    return max(1, int(min(cores)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, by either version, each with all that are above it."""
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths.update((name, path) for name in controllers.split(","))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields = kind.split(" ")  # between the first and the last is the source, which may be empty
        kind_name, options = fields[0], fields[-1]
        name = {"cgroup2": "", "cgroup": controller}.get(kind_name)
        if name is None or name not in paths or (name and name not in options.split(",")):
            continue
        mounted, top = mount.split()[3], root / mount.split()[4].lstrip("/")
        # In a container the path may be the host's, which is not mounted there: the top of the mount is its own group.
        inside = os.path.relpath(paths[name], mounted)
        group = top if inside.startswith("..") else top / inside
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _cpu_max(group: Path) -> tuple[int, int]:
    """Return a group's quota and period in microseconds; a quota of 0 or less is none."""
    quota, _, period = next(iter(_lines(group / "cpu.max")), "").partition(" ")
    if quota.isdigit() and period.isdigit():
        return int(quota), int(period)
    return _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0


def _inactive_file_bytes(group: Path) -> int:
    stat = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    """Return None for `max`, and if there is no such file."""
    text = next(iter(_lines(file)), "")
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
