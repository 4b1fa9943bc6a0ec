"""Every file of examples/ does what it demonstrates: clients against a real 1P1D of chitu-tiny, the job script up to
srun.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from nursery import FORKED
from serve_process import ServeProcess

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
OTHERS = {"page_store.py", "README.md", "image.py", "trainer.py", "slurm/serve.sbatch"}


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


# ----------------------------------------------------------------------------------------------------------------------
# A wheel of this tree, installed into a bare environment and started from there, far from the sources.


SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def _run(*argv: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _build(tmp_path: Path) -> Path:
    """Build the wheel from a copy, so that no older build gets into it; without isolation, so that it needs no
    network."""
    copy = tmp_path / "sources"
    for package in ("chitu", "benchmark"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    _run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('dist')", cwd=copy)
    (wheel,) = (copy / "dist").glob("*.whl")
    shutil.move(wheel, tmp_path)
    shutil.rmtree(copy)
    return tmp_path / wheel.name


def _install(wheel: Path, folder: Path) -> Path:
    """Install the wheel, with the dependencies of the environment that runs this test; return the environment's
    `bin`."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=wheel.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file comes after the environment's own, and .pth files in it, as of an editable chitu, are not
    # read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install")
    _run(*pip, "--quiet", "--no-index", "--no-deps", str(wheel), cwd=wheel.parent)
    return folder / "bin"


@pytest.mark.by_hand
def test_a_wheel_serves_far_from_the_sources(tmp_path: Path) -> None:
    wheel = _build(tmp_path)
    assert wheel.name.startswith("chitu_pd-")
    assert {name.split("/")[0].split("-")[0] for name in ZipFile(wheel).namelist()} == {"chitu", "chitu_pd"}
    binaries = _install(wheel, tmp_path / "env")
    home = _run(str(binaries / "python"), "-c", "import chitu; print(chitu.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path)), home
    (version,) = set(wheel.name.split("-")[1:2])
    assert _run(str(binaries / "chitu"), "--version", cwd=tmp_path) == f"chitu {version}\n"

    argv = [str(binaries / "chitu"), "serve", "--port", "0", "--first-completion", "--log-dir", str(tmp_path / "logs")]
    with ServeProcess(argv, cwd=tmp_path) as process:
        url = process.wait_line(r"at (http://127\.0\.0\.1:\d+)", timeout_s=120)[1]
        assert "4827" in process.printed_request()
        answer = process.wait_line(r"^answer: +The .* (\d{4})\.$", timeout_s=60)[1]
        process.wait_line(f"^ +✓ {answer} is right$")
        process.wait_line(
            r"^served by: +P0 -> D0 · \d{3,4} prompt \+ \d+ output tokens · (\d+ cached · )?[\d.]+ MiB KV"
        )
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"<title>" in page.read()
        code = process.signal_and_wait(signal.SIGTERM)
    assert code == 0
