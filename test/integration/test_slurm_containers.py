"""`--container` of the Slurm scripts: what srun, Pyxis and Apptainer are asked, and what runs in the image. The nodes
have no Python with our packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/bash
[ "$1" != --help ] || { cat "$FOLDER/srun.help"; exit; }
echo "$*" >>"$FOLDER/srun.calls"
while [ "$1" != bash ]; do shift; done
for node in 0 1; do
    export SLURM_STEP_ID=0 SLURM_JOB_ID=7 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_NODEID=$node
    SLURM_STEP_NODELIST=127.0.0.[1-2] "${@//\\/opt\\/chitu/$FOLDER/image}" || exit
done
"""
APPTAINER = """#!/bin/bash
echo "$*" >>"$FOLDER/apptainer.calls"
while [ "$1" != bash ]; do shift; done
exec "${@//\\/opt\\/chitu/$FOLDER/image}"
"""
PYTHON = """#!/bin/bash
case "$2" in
    chitu.cli) echo "$CHITU_CLUSTER_KEY ${*:3}" >>"$FOLDER/nodes" ;;
    chitu.process.node_devices) exit 1 ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a node without .venv, and an image that has one."""
    executable(tmp_path / "bin" / "srun", SRUN)
    executable(tmp_path / "bin" / "scontrol", "#!/bin/sh\nexit 1\n")
    executable(tmp_path / "bin" / "python3", "#!/bin/sh\nexit 1\n")
    executable(tmp_path / "image" / ".venv" / "bin" / "python", PYTHON)
    (tmp_path / "image" / "chitu").symlink_to(ROOT / "chitu")
    for place in ("node", "image"):
        shutil.copytree(ROOT / "script", tmp_path / place / "script", dirs_exist_ok=True)
    (tmp_path / "srun.help").touch()
    return tmp_path


def run(folder: Path, *words: str, **names: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": f"{folder}/bin:/usr/bin:/bin", "FOLDER": str(folder), "REAL": sys.executable, **names}
    own |= {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}
    script = folder / "node" / "script" / "srun_pd_disagg_2p3d_two_nodes.sh"
    words = ("bash", str(script), "--model", "/models/M", *words)
    return subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True, timeout=120)


def check_nodes(folder: Path, key: str = "") -> None:
    lines = [line.split() for line in (folder / "nodes").read_text().splitlines()]
    assert len(lines) == 2 and len({words[0] for words in lines}) == 1
    assert lines[0][0] == key if key else len(lines[0][0]) == 64
    for number, words in enumerate(lines):
        expected = f"node pd_disagg_2p3d_multi_node --hosts 127.0.0.1,127.0.0.2 --node-index {number}".split()
        assert words[1 : 1 + len(expected)] == expected
        assert words[1 + len(expected) :][:3] == ["--model", "/models/M", "scheduler.threads=1"]
        assert "--container" not in words


@pytest.mark.parametrize("key", ["", "0123456789-of-the-operator"])
def test_pyxis_gets_the_image_from_srun(folder: Path, key: str) -> None:
    (folder / "srun.help").write_text("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n")
    names = {"CHITU_CLUSTER_KEY": key} if key else {}
    done = run(folder, "--container", "registry#chitu:1", "scheduler.threads=1", PD_CONTAINER_MOUNTS="/a:/b", **names)
    assert done.returncode == 0, done.stderr
    check_nodes(folder, key)
    (call,) = (folder / "srun.calls").read_text().splitlines()
    assert "--container-image=registry#chitu:1" in call and f"--container-workdir={folder}" in call
    assert f"--container-mounts={folder}:{folder},/models/M:/models/M,/a:/b" in call and "--kill-on-bad-exit=1" in call


def test_apptainer_runs_on_each_node_where_srun_has_no_images(folder: Path) -> None:
    executable(folder / "bin" / "apptainer", APPTAINER)
    done = run(folder, "--container=/images/chitu.sif", "--nodes=2", "scheduler.threads=1")
    assert done.returncode == 0, done.stderr
    check_nodes(folder)
    (call,) = (folder / "srun.calls").read_text().splitlines()
    assert "--container-image" not in call and "--container=/images/chitu.sif" in call
    calls = (folder / "apptainer.calls").read_text().splitlines()
    bound = f"exec --bind {folder}:{folder},/models/M:/models/M --pwd {folder}"
    assert [each.split(" bash ")[0].replace(" --nv", "") for each in calls] == [f"{bound} /images/chitu.sif"] * 2


def test_a_node_with_neither_says_so(folder: Path) -> None:
    done = run(folder, "--container=/images/chitu.sif")
    assert done.returncode == 2 and "there is neither Pyxis (srun --container-image) nor apptainer" in done.stderr
    assert not (folder / "nodes").exists()


def test_a_step_that_has_begun_cannot_get_a_container_from_pyxis(folder: Path) -> None:
    (folder / "srun.help").write_text("      --container-image=IMAGE\n")
    done = run(folder, "--container=chitu", SLURM_STEP_ID="0", SLURM_JOB_ID="7")
    assert done.returncode == 2 and "give srun --container-image=chitu" in done.stderr
