"""Every command of docs/year.md that needs no root, against a real 2P2D."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from nursery import FORKED
from support.router_process import wait_until
from support.steady_load import Ask, SteadyLoad

from chitu import cli
from chitu.assets import TINY_MODEL_DIR
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import ENVIRONMENT_KEY, dump_topology, load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.router_client import RouterClient
from chitu.net.curve import derive

ROOT = Path(__file__).parents[2]
ROUTER = "dp_config.router"
COMMANDS = re.findall(r"^    (.+)$", (ROOT / "docs" / "year.md").read_text(), re.MULTILINE)
ELSEWHERE = {"script/setup.sh", "systemctl enable --now chitu"}
"""What CI does before any test, and what needs root."""
LONG = ("chitu verify", "chitu bench", "chitu size")
"""What tests of its own show, too, and takes long."""
URL = "http://a:21003"

pytestmark = pytest.mark.timeout(300)


class Operated:
    """A 2P2D of two revisions under a small load, and an operator's shell beside it."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder, self.cluster = folder, cluster
        secrets = derive(cluster_key_of(cluster.topology))
        assert secrets is not None
        self.client = RouterClient(cluster.url, secrets.token)
        self.env = {
            **os.environ,
            ENVIRONMENT_KEY: cluster_key_of(cluster.topology),
            "CHITU_API_KEY": secrets.token,
            "PYTHONPATH": str(ROOT),
        }

    def argv(self, command: str) -> list[str]:
        words = shlex.split(command.replace(URL, self.cluster.url))
        return [sys.executable, "-m", "chitu.cli", *words[1:]] if words[0] == "chitu" else words

    def run(self, command: str) -> str:
        done = subprocess.run(
            self.argv(command), cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self) -> set[str]:
        return {one.name for one in self.client.cluster().instances if one.status == "up"}

    def join(self, command: str) -> None:
        """Run `chitu join` until its instance is in the cluster, then end it as Ctrl-C does."""
        before = self.up()
        with subprocess.Popen(self.argv(command), cwd=self.folder, env=self.env) as process:
            try:
                wait_until(lambda: len(self.up()) > len(before), 60, self.up)
            finally:
                process.terminate()
                process.wait(60)
        wait_until(lambda: self.up() == before, 60, self.up)

    def drain(self, command: str) -> None:
        """Drain an instance, and start it again."""
        name = shlex.split(command)[2]
        self.run(command)
        self.cluster.wait_exit(name)
        self.cluster.restart(name)
        self.cluster.wait_ready()

    def snapshot(self, command: str) -> None:
        """Take a snapshot of a request that runs; within this process, since it ends soon."""
        request_id = uuid.uuid4().hex
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        headers = {"X-Request-Id": request_id}
        with httpx.stream(
            "POST", f"{self.cluster.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False
        ) as stream:
            assert stream.status_code == 200, stream.read()
            for name in ("D0", "D1"):  # it would end within a second
                self.cluster.kill(name, signal.SIGSTOP)
            words = shlex.split(command.replace(" ID ", f" {request_id} ").replace(URL, self.cluster.url))
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(self.folder)
                patch.setenv("CHITU_API_KEY", self.env["CHITU_API_KEY"])
                code = cli.main(words[1:])
            for name in ("D0", "D1"):
                self.cluster.kill(name, signal.SIGCONT)
        assert code == 0
        assert (self.folder / "answer.request").stat().st_size > 100


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("year")
    both = "[{port: 0, revision: blue}, {port: 0, revision: green}]"
    settings = [f"model.path={TINY_MODEL_DIR}", "model.served_name=m", "cache.num_pages=200", "scheduler.threads=1"]
    settings += [f"{ROUTER}.{role}_schedulers={both}" for role in ("prefill", "decode")]
    topology = load_topology("pd_disagg_1p1d_local", [*settings, f"{ROUTER}.kept_requests.dir={folder / 'kept'}"])
    (folder / "cluster.yaml").write_text(dump_topology(topology))
    with LocalCluster(topology, entries=FORKED) as cluster:
        cluster.wait_ready()
        yield Operated(folder, cluster)


@pytest.fixture(scope="module")
def load(operated: Operated) -> Iterator[SteadyLoad]:
    def ask(rng: random.Random) -> Ask:
        return Ask(tuple(rng.choices(range(5, 400), k=rng.randint(20, 120))), 20)

    load = SteadyLoad(lambda: operated.cluster.url, "m", ask, lambda ask: [], 60.0)
    yield load
    load.close()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, id=one, marks=[pytest.mark.by_hand] if one.startswith(LONG) else [])
        for one in COMMANDS
        if one not in ELSEWHERE
    ],
)
def test_a_command_of_the_year_does_what_it_says(operated: Operated, load: SteadyLoad, command: str) -> None:
    special: dict[str, Callable[[str], object]] = {
        "chitu join": operated.join,
        "chitu drain": operated.drain,
        "chitu snapshot": operated.snapshot,
    }
    if command.startswith("chitu bench"):
        load.start(2)
    special.get(" ".join(command.split()[:2]), operated.run)(command)


def test_the_page_has_the_commands_that_run_elsewhere() -> None:
    assert set(COMMANDS) > ELSEWHERE
