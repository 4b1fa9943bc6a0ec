"""Limits of control groups, read from files as the kernel writes them. `test/integration/test_limited_instances.py`
sets limits of the kernel."""

from pathlib import Path

import pytest

from chitu.net.control_groups import memory_left_bytes, usable_cores

MIB = 1 << 20
V2_MOUNT = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "40 31 0:35 {top} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
V1_CPU = "41 31 0:36 {top} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture
def write(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    return write


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


def write_v2(write, group, *, limit="max", used=0, inactive=0, high="max", cpu="max 100000"):
    folder = Path("sys/fs/cgroup") / group
    write(folder / "memory.max", limit)
    write(folder / "memory.high", high)
    write(folder / "memory.current", str(used))
    write(folder / "memory.stat", f"anon {used}\nfile 0\ninactive_file {inactive}\nactive_file 7")
    write(folder / "cpu.max", cpu)


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    assert memory_left_bytes(tmp_path) is None
    assert usable_cores(tmp_path) == 16


def test_groups_without_limits_have_none(tmp_path, write):
    write("proc/self/cgroup", "0::/user.slice/session-1.scope")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "user.slice", used=300 * MIB)
    write_v2(write, "user.slice/session-1.scope", used=200 * MIB)
    assert memory_left_bytes(tmp_path) is None
    assert usable_cores(tmp_path) == 16


def test_page_cache_that_is_dropped_first_counts_as_free(tmp_path, write):
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "", limit=str(1000 * MIB), used=700 * MIB, inactive=200 * MIB)
    assert memory_left_bytes(tmp_path) == 500 * MIB


def test_a_limit_of_a_group_above_holds(tmp_path, write):
    """Slurm does this: it limits the job, and not the step in it."""
    write("proc/self/cgroup", "0::/slurm/job_7/step_0/task_0")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "slurm/job_7", limit=str(4000 * MIB), used=3900 * MIB, cpu="800000 100000")
    write_v2(write, "slurm/job_7/step_0", limit=str(8000 * MIB), used=100 * MIB)
    assert memory_left_bytes(tmp_path) == 100 * MIB
    assert usable_cores(tmp_path) == 8


def test_the_limit_beyond_which_the_kernel_slows_a_group_holds_too(tmp_path, write):
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "", limit=str(1000 * MIB), high=str(800 * MIB), used=500 * MIB)
    assert memory_left_bytes(tmp_path) == 300 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path, write):
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "", limit=str(10 * MIB), used=11 * MIB)
    assert memory_left_bytes(tmp_path) == 0


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("250000", 2), ("1600000", 16), ("9900000", 16)])
def test_a_quota_is_rounded_down_to_whole_cores_and_never_to_none(tmp_path, write, quota, cores):
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "", cpu=f"{quota} 100000")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("top", ["/", "/docker/abc"])
def test_version_1_of_a_container_whose_path_is_the_hosts(tmp_path, write, top):
    """Docker mounts only a container's own group; without a cgroup namespace the path is still the host's."""
    write("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc")
    write("proc/self/mountinfo", "\n".join((V1_MEMORY.format(top=top), V1_CPU.format(top=top))))
    inside = "docker/abc" if top == "/" else ""
    memory, cpu = Path("sys/fs/cgroup/memory", inside), Path("sys/fs/cgroup/cpu,cpuacct", inside)
    write(memory / "memory.limit_in_bytes", str(600 * MIB))
    write(memory / "memory.usage_in_bytes", str(500 * MIB))
    write(memory / "memory.stat", f"inactive_file 1\ntotal_inactive_file {50 * MIB}")
    write(cpu / "cpu.cfs_quota_us", "300000")
    write(cpu / "cpu.cfs_period_us", "100000")
    assert memory_left_bytes(tmp_path) == 150 * MIB
    assert usable_cores(tmp_path) == 3


def test_version_1_without_limits_has_none(tmp_path, write):
    write("proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/")
    write("proc/self/mountinfo", "\n".join((V1_MEMORY.format(top="/"), V1_CPU.format(top="/"))))
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "12345")
    write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert memory_left_bytes(tmp_path) is None
    assert usable_cores(tmp_path) == 16


def test_a_container_with_groups_of_its_own_has_the_limit_of_the_top(tmp_path, write):
    write("proc/self/cgroup", "0::/../../system.slice")
    write("proc/self/mountinfo", V2_MOUNT)
    write_v2(write, "", limit=str(100 * MIB), used=40 * MIB)
    assert memory_left_bytes(tmp_path) == 60 * MIB


def test_mounts_without_a_source_are_passed_over(tmp_path, write):
    write("proc/self/cgroup", "0::/")
    write("proc/self/mountinfo", "50 24 0:44 / /mnt rw,relatime - tmpfs  rw\n" + V2_MOUNT)
    write_v2(write, "", limit=str(100 * MIB), used=40 * MIB)
    assert memory_left_bytes(tmp_path) == 60 * MIB
