"""One 1P1D cluster for all clients, and the interpreter that has them: `script/setup.sh` creates it, `.venv/clients`.

If it is missing the tests are skipped, and the reason names the command that creates it; with CI=true they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nursery import FORKED

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster

HERE = Path(__file__).parent
PATIENCE_S = 400
"""Timeout of a client: the first import of one reads some thousand files."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
"""Environment that keeps clients offline: what they would fetch at start is in their packages, too."""
CALLS = '{#- <tool_call> {"name": ..., "arguments": ...} </tool_call> -#}\n'
"""Put before the model's chat template, so that it has a format of tool calls."""

RunClient = Callable[..., str]


@pytest.fixture(scope="session")
def clients_python() -> Path:
    python = Path(sys.prefix) / "clients/bin/python"
    if not python.exists():
        reason = f"there is no {python}: CI=true script/setup.sh --dev makes it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def model(clients_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chitu-tiny"
    shutil.copytree(TINY_MODEL_DIR, folder)
    template = folder / "chat_template.jinja"
    template.write_text(CALLS + template.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    settings = [f"model.path={model}", "model.served_name=tiny"]
    topology = load_topology("pd_disagg_1p1d_local.yaml", settings)
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready(300)
        yield cluster


@pytest.fixture
def run_client(clients_python: Path, cluster: LocalCluster, tmp_path: Path) -> RunClient:
    """Run a script of this folder, or a module of the clients' environment, and return its output."""

    def run(*args: str | Path) -> str:
        env = {**os.environ, **OFFLINE, "OPENAI_BASE_URL": f"{cluster.url}/v1", "HF_HOME": str(tmp_path / "hf")}
        if str(args[0]).endswith(".py"):
            args = (HERE / args[0], *args[1:])
        done = subprocess.run(
            [clients_python, *args], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
        )
        router = "\n".join(cluster.logs("router").splitlines()[-10:])
        assert done.returncode == 0, f"{args} exits {done.returncode}:\n{done.stdout}\n{done.stderr}\nrouter:\n{router}"
        return done.stdout

    return run
