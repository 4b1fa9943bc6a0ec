"""One launcher for several machines gives them one cluster key, which appears on no command line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OWN_KEY = "0123456789-of-the-operator"


def executable(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def run(script: list[str], environment: dict[str, str], key: str | None) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CHITU_"))}
    keys = {"CHITU_CLUSTER_KEY": key} if key else {}
    command = ["bash", *script, "--model", "/models/m"]
    result = subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment, **keys}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("key", [None, OWN_KEY])
def test_ssh_brings_the_key_by_stdin_and_leaves_no_file(tmp_path: Path, key: str | None) -> None:
    # Stands for the interpreter, which creates the key, and for the node: records what it was given.
    python = executable(
        tmp_path / "python",
        f'[ "$1" != -c ] && [ "$2" != chitu.launch.addresses ] || exec {sys.executable} "$@"',
        f'echo "$CHITU_CLUSTER_KEY $PD_MASTER_ADDR" >>{tmp_path}/nodes',
        f'tr "\\0" " " </proc/$$/cmdline >>{tmp_path}/commands',
        # The first end is the end of all nodes, so none ends before both have started.
        f'until [ "$(wc -l <{tmp_path}/nodes)" = 2 ]; do sleep 0.05; done',
    )
    ssh = executable(
        tmp_path / "ssh", f'echo "$@" >>{tmp_path}/commands', f'unset CHITU_CLUSTER_KEY; TMPDIR={tmp_path} bash -c "$2"'
    )
    (tmp_path / "commands").touch()
    script = ["script/start_pd_separation.sh", "--hosts", "127.0.0.1,127.0.0.2", "--ssh"]
    run(script, {"PYTHON": python, "PD_SSH": ssh}, key)
    given = [line.split() for line in (tmp_path / "nodes").read_text().splitlines()]
    assert [address for _, address in given] == ["127.0.0.1"] * 2
    (shared,) = {key for key, _ in given}
    assert shared == key if key else len(shared) == 64
    commands = (tmp_path / "commands").read_text()
    assert "--node-index 1" in commands and shared not in commands
    remote = re.findall(r"^.*127\.0\.0\.\d (exec .*)$", commands, re.MULTILINE)
    is_plain = re.compile(r"exec bash (-c '[^'\\!]*'|[-\w/.]+)").fullmatch  # read alike by bash, dash, fish and tcsh
    assert len(remote) == 4 and all(map(is_plain, remote)), remote
    assert {path.name for path in tmp_path.iterdir()} == {"python", "ssh", "nodes", "commands"}


@pytest.mark.parametrize(("how", "code"), [("refused", 2), ("TERM", 0), ("INT", 130)])
def test_nodes_that_ssh_has_started_end_if_it_does_not_start_all(tmp_path: Path, how: str, code: int) -> None:
    python = executable(
        tmp_path / "python",
        f'[ "$1" != -c ] && [ "$2" != chitu.launch.addresses ] || exec {sys.executable} "$@"',
        f'echo "$$" >>{tmp_path}/nodes',
        "while :; do sleep 0.05; done",
    )
    end = "exit 255" if how == "refused" else f"kill -{how} $(ps -o ppid= $(ps -o ppid= $PPID))"  # of `timeout`, of $()
    ssh = executable(
        tmp_path / "ssh",
        f'[ "$1" = 127.0.0.1 ] || until [ -s {tmp_path}/nodes ]; do sleep 0.05; done',
        f'[ "$1" = 127.0.0.1 ] || {end}',
        f'TMPDIR={tmp_path} exec bash -c "$2"',
    )
    result = subprocess.run(
        ["bash", "script/start_pd_separation.sh", "--hosts", "127.0.0.1,127.0.0.2", "--ssh", "--model", "/models/m"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": python, "PD_SSH": ssh, "CHITU_CLUSTER_KEY": OWN_KEY},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash traps no signal that was ignored
        capture_output=True,
        text=True,
        timeout=60,
    )
    (first,) = (tmp_path / "nodes").read_text().split()
    assert not Path("/proc", first).exists()
    says = "127.0.0.2 did not take the cluster key" in result.stderr
    assert (result.returncode, says) == (code, how == "refused"), result.stderr


def test_ssh_gives_up_a_machine_that_is_silent(tmp_path: Path) -> None:
    """Without these options the script would not end for hours after a machine has lost its power."""
    python = executable(tmp_path / "python")
    executable(tmp_path / "ssh", f'echo "$@" >>{tmp_path}/commands; echo file')
    result = subprocess.run(
        ["bash", "script/start_pd_separation.sh", "--hosts", "127.0.0.1", "--ssh", "--model", "/models/m"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": python, "CHITU_CLUSTER_KEY": OWN_KEY},
        timeout=60,
    )
    key, node = (tmp_path / "commands").read_text().splitlines()
    options = "-o ConnectTimeout=10 -o ServerAliveInterval=5"
    assert key.startswith(f"{options} 127") and node.startswith(f"{options} -tt 127") and result.returncode == 0


def test_a_login_whose_shell_hangs_is_given_up(tmp_path: Path) -> None:
    """Such as one with its home directory on a file server that does not answer."""
    real = shutil.which("timeout")
    executable(tmp_path / "timeout", f'[ "$1 $2" = "--foreground 120" ] && exec {real} 0.3 "${{@:3}}"')
    result = subprocess.run(
        ["bash", "script/start_pd_separation.sh", "--hosts", "127.0.0.1", "--ssh", "--model", "/models/m"],
        cwd=ROOT,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PD_SSH": executable(tmp_path / "ssh", "exec sleep 1000"),
            "CHITU_CLUSTER_KEY": OWN_KEY,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2 and "127.0.0.1 did not take the cluster key" in result.stderr


@pytest.mark.parametrize("key", [None, OWN_KEY])
def test_srun_takes_the_key_along_in_the_environment(tmp_path: Path, key: str | None) -> None:
    executable(tmp_path / "srun", f'echo "$CHITU_CLUSTER_KEY" >{tmp_path}/key; echo "$@" >{tmp_path}/command')
    path = f"{tmp_path}:{os.environ['PATH']}"
    run(["script/srun_pd_disagg_1p1d_two_nodes.sh"], {"PATH": path, "PYTHON": sys.executable}, key)
    shared = (tmp_path / "key").read_text().strip()
    assert shared == key if key else len(shared) == 64
    command = (tmp_path / "command").read_text()
    # Without the option srun takes nothing along in a job of `sbatch --export=NONE`, not even PATH.
    assert shared not in command and "--export=ALL" in command


@pytest.mark.parametrize(
    "step", ["4294967291", "-5", "4294967290", "-6"], ids=["batch", "batch-26", "salloc", "salloc-26"]
)
def test_a_step_that_srun_did_not_make_starts_srun_on_all_nodes_of_its_job(tmp_path: Path, step: str) -> None:
    executable(tmp_path / "srun", f'echo "$@" >{tmp_path}/command')
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": step, "SLURM_NODEID": "0"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    run(["script/srun_pd_disagg_1p1d_two_nodes.sh"], {"PATH": path, "PYTHON": sys.executable, **job}, OWN_KEY)
    assert "--nodes=3 --ntasks=3" in (tmp_path / "command").read_text()


@pytest.mark.parametrize("task", ["0", "1"])
def test_every_task_of_a_step_with_several_a_node_is_refused(tmp_path: Path, task: str) -> None:
    started = executable(tmp_path / "python", f"touch {tmp_path}/started; echo 127.0.0.1 127.0.0.2")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_NUM_NODES": "2"}
    result = subprocess.run(
        ["bash", "script/srun_pd_disagg_1p1d_two_nodes.sh", "--model", "/models/m"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": started, **step, "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": task},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2 and not (tmp_path / "started").exists()
    assert "this step has 4 tasks on 2 nodes: srun with --ntasks-per-node=1" in result.stderr


def test_a_checkout_without_its_venv_names_the_script_that_makes_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "script", tmp_path / "script")
    executable(tmp_path / "python3", f'exec {sys.executable} -I -S "$@"')  # has none of the packages
    result = subprocess.run(
        ["bash", "script/srun_pd_disagg_1p1d_two_nodes.sh", "--model", "/models/m"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "script/setup.sh" in result.stderr


SCRIPTS = sorted(path.name for path in (ROOT / "script").glob("*.sh") if path.name not in ("pd_common.sh", "test.sh"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_what_stands_at_the_head_of_a_script(name: str) -> None:
    result = subprocess.run(["bash", f"script/{name}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") >= 3 and "set -" not in result.stdout and "#" not in result.stdout


def test_a_topology_that_is_not_there_is_one_sentence_before_any_job_or_ssh(tmp_path: Path) -> None:
    used = executable(tmp_path / "srun", f"touch {tmp_path}/started")
    for script in (
        ["srun_pd_disagg.sh", "nosuch.yaml"],
        ["start_pd_separation.sh", "--hosts", "127.0.0.1", "--ssh", "--topology", "nosuch.yaml"],
    ):
        result = subprocess.run(
            ["bash", f"script/{script[0]}", *script[1:], "--model", "/models/m"],
            cwd=ROOT,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "PD_SSH": used},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
        assert "there is no topology file 'nosuch.yaml'" in result.stderr
        assert not (tmp_path / "started").exists()
