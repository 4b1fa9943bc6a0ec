"""Every file of examples/ does what it demonstrates: clients against a real 1P1D of chitu-tiny, the job script up to
srun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import FORKED

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KEY = "example-key"
CLIENTS = {
    "openai_client.py": (
        "completion: The green bridge has number 6200.",
        "chat: The green bridge has number 6200.",
        "streamed: The green bridge has number 6200.",
        "39 prompt and 12 output tokens",
    ),
    "agent.py": ("the green bridge opens it, found with 3 questions",),
    "curl.sh": ('"id":"chitu-tiny"', "The green bridge has number 6200.", "data: [DONE]", '"status":"ok"'),
}
"""Part of the expected output of each client."""
OTHERS = {"README.md", "slurm/serve.sbatch"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    settings = [f"model.path={TINY_MODEL_DIR}", "model.served_name=chitu-tiny", "cache.num_pages=256"]
    topology = load_topology("pd_disagg_1p1d_local", settings)
    with LocalCluster(topology, entries=FORKED, env={"CHITU_API_KEYS": KEY}) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_prints_what_its_page_promises(cluster: LocalCluster, name: str) -> None:
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    env = {**os.environ, "OPENAI_BASE_URL": f"{cluster.url}/v1", "OPENAI_API_KEY": KEY, "NO_PROXY": "*"}
    done = subprocess.run([*command, EXAMPLES / name], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [text for text in CLIENTS[name] if text not in done.stdout], done.stdout


def test_the_job_script_hands_model_and_settings_to_srun(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "key of ${#CHITU_CLUSTER_KEY} characters, srun $*"\n')
    srun.chmod(0o755)
    # As in a batch job before its first srun step.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "PYTHON": sys.executable}
    script = ["bash", EXAMPLES / "slurm" / "serve.sbatch"]
    done = subprocess.run(
        [*script, "/models/m", "a.b=c"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in done.stdout and "key of 0 " not in done.stdout
    assert done.stdout.rstrip().endswith("pd_disagg_2p3d_gpu --model /models/m a.b=c")
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "give the model's folder" in done.stderr


def test_no_example_is_left_out_here_or_in_their_readme() -> None:
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert files == CLIENTS.keys() | OTHERS
    readme = (EXAMPLES / "README.md").read_text()
    assert not [name for name in files - {"README.md"} if f"`{name}`" not in readme]
