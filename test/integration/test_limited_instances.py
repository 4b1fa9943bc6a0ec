"""Instances in a real control group: pool and threads are cut to what it leaves."""

import os
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.router_process import wait_until

from chitu.net.control_groups import _groups
from chitu.process.child import ChildProcess, ProcessSpec

MEMORY_BYTES, QUOTA_US = 1 << 30, 100_000
FILES = {
    "memory": {"memory.max": MEMORY_BYTES, "memory.limit_in_bytes": MEMORY_BYTES},
    "cpu": {"cpu.max": f"{QUOTA_US} 100000", "cpu.cfs_quota_us": QUOTA_US},
}


@pytest.fixture
def limited():
    """Create control groups of this test, with a limit of memory and one of CPU time; yield their folders."""
    made: list[Path] = []
    with ExitStack() as stack:
        for controller, files in FILES.items():
            for top in (group for group in _groups(Path("/"), controller) if (group / "cgroup.procs").exists()):
                folder = top / f"chitu-test-{os.getpid()}"
                try:
                    folder.mkdir(exist_ok=True)
                except OSError:
                    continue
                stack.callback(folder.rmdir)
                if any(_write(folder / name, text) for name, text in files.items()):
                    made.append(folder)
                    break
        if len(made) < len(FILES):
            pytest.skip("this machine lets no test make control groups with limits")
        yield made


def _write(file: Path, text: object) -> bool:
    try:
        file.write_text(str(text)) if file.exists() else None
    except OSError:
        return False
    return file.exists()


def test_a_process_in_a_group_plans_with_what_the_group_leaves(limited):
    """Runs in a process of its own, which enters the groups before it begins."""
    code = (
        "from chitu.engine.memory_budget import available_cpu_bytes as memory\n"
        "from chitu.net.control_groups import usable_cores\n"
        "print(memory(), usable_cores())"
    )

    def enter() -> None:
        for folder in limited:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.run([sys.executable, "-c", code], preexec_fn=enter, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    left_bytes, cores = map(int, process.stdout.split())
    assert MEMORY_BYTES // 2 < left_bytes <= MEMORY_BYTES  # less what Python itself uses
    assert cores == 1


def test_a_process_that_its_group_has_no_memory_for_is_said_to_have_ended_so(limited, tmp_path):
    code = (
        "import os, pathlib, sys\n"
        "for group in sys.argv[1:]: pathlib.Path(group, 'cgroup.procs').write_text(str(os.getpid()))\n"
        f"b'x' * {3 * MEMORY_BYTES}"
    )
    spec = ProcessSpec("P0", "", (sys.executable, "-c", code, *map(str, limited)))
    child = ChildProcess(spec, {}, tmp_path / "log", uuid.uuid4().hex)
    wait_until(lambda: child.exit_code() is not None, 60, "the kernel to end it")
    text = child.describe_end(child.exit_code())
    assert text == "killed by SIGKILL; the kernel killed a process for lack of memory (OOM) meanwhile", child.tail()


def test_a_process_that_was_killed_otherwise_is_not(tmp_path):
    child = ChildProcess(ProcessSpec("P0", "", ("sleep", "60")), {}, tmp_path / "log", uuid.uuid4().hex)
    child.kill_tree()
    assert child.describe_end(child.exit_code()) == "killed by SIGKILL"
