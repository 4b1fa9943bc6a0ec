"""`chitu node` with stand-in processes on one host: ready, a signal, a death, and a start that takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from nursery import launcher
from ports import free_ports
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.net.curve import derive, make_context
from chitu.net.process_deaths import pid_namespace
from chitu.net.sockets import bind
from chitu.protocol import Leave, coordination_codec
from chitu.types import Role

STANDINS = Path(__file__).parent / "standins"
KEY = "of this cluster 0123456789"
Start = Callable[..., ServeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a node of a 1P1D whose schedulers behave as `served_name` says."""
    (tmp_path / "config.json").write_text("{}")
    names = ["port", "stats_port", "token_port"]
    names += [f"pd_disaggregation.{name}_port" for name in ("coordination", "metadata_sync", "bootstrap")]
    overrides = [f"dp_config.router.{name}={port}" for name, port in zip(names, free_ports(6), strict=True)]
    with ExitStack() as stack:

        def start(behaviour: str = "good", timeout_s: float = 90.0, *more: str, torchrun: bool = False) -> ServeProcess:
            words = ["standin_router", "standin_scheduler", "torchrun" if torchrun else "direct"]
            words += ["node", "--node-index", "0", "--log-dir", f"{tmp_path}/logs"]
            words += ["--ready-timeout", str(timeout_s), "--on-failure", f"touch {tmp_path}/told"]
            words += ["pd_disagg_1p1d_local", f"model.path={tmp_path}", f"model.served_name={behaviour}"]
            environment = {"PYTHONPATH": f"{STANDINS}{os.pathsep}{os.environ['PYTHONPATH']}", "CHITU_CLUSTER_KEY": KEY}
            argv = [sys.executable, "-m", "forked_chitu", *words, *overrides, *more]
            return stack.enter_context(ServeProcess(argv, environment, popen=launcher))

        yield start


def test_a_signal_ends_everything_with_0(start: Start, tmp_path: Path) -> None:
    node = start(torchrun=True)
    node.wait_line("chitu serves 'good' with P0, D0 at http://127.0.0.1:")
    node.wait_line("Ctrl-C ends it")
    assert len(node.offspring()) == 5  # router, two torchruns, two schedulers
    code = node.signal_and_wait(signal.SIGTERM)
    assert (code, node.offspring()) == (0, {})
    assert not (tmp_path / "told").exists()


def test_a_death_ends_the_node_with_1_tells_the_others_and_names_who_died(start: Start, tmp_path: Path) -> None:
    node = start(torchrun=True)
    node.wait_line("Ctrl-C ends it")
    (decode,) = node.pids_of("decode")
    os.kill(decode, signal.SIGKILL)
    node.wait_line(r"D0 ended \(killed by SIGKILL\).*its last lines")
    node.wait_line("node 0 ends because D0 ended")
    assert node.process.wait(60) == 1
    assert (tmp_path / "told").exists()
    assert node.offspring() == {}


def test_a_death_is_told_to_the_router_in_the_name_of_the_dead(start: Start, tmp_path: Path) -> None:
    context = make_context(derive(KEY))
    (port,) = free_ports(1)
    node = start("good", 90.0, f"dp_config.router.pd_disaggregation.coordination_port={port}", torchrun=True)
    node.wait_line("Ctrl-C ends it")
    coordination, _ = bind(context, zmq.ROUTER, "127.0.0.1", port)  # the stand-in router does not bind it
    (decode,) = node.pids_of("decode")
    os.kill(decode, signal.SIGKILL)
    assert coordination.poll(20_000), "no word came"
    leave = coordination_codec.decode(coordination.recv_multipart()[-1])
    assert isinstance(leave, Leave)
    assert (leave.role, leave.engine_rank) == (Role.DECODE, 0)
    assert leave.incarnation > 0
    assert decode in leave.dead_pids and leave.pid_namespace == pid_namespace()
    assert node.process.wait(60) == 1
    context.destroy(linger=0)


def test_a_death_before_it_is_ready_ends_the_start_with_its_last_words(start: Start, tmp_path: Path) -> None:
    node = start("die_at_start")
    node.wait_line(r"ended \(exit code 3\)")
    node.wait_line("the reason why it ends")
    assert node.process.wait(60) == 1
    assert (tmp_path / "told").exists()
    assert node.offspring() == {}


def test_one_that_the_router_does_not_take_ends_the_start_at_once(start: Start, tmp_path: Path) -> None:
    """The instance was ready, and the launcher waits for nothing that could still come."""
    node = start("refused")
    node.wait_line(r"ended \(exit code 1\)")
    node.wait_line("the router refused me")
    node.wait_line("node 0 ends because [PD]0 ended")
    assert node.process.wait(60) == 1
    assert (tmp_path / "told").exists()


def test_a_start_that_takes_too_long_names_what_is_missing(start: Start, tmp_path: Path) -> None:
    node = start("slow", timeout_s=1)
    node.wait_line("not ready after 1 s: P0 is warmup; D0 is warmup")
    assert node.process.wait(60) == 1
    wait_until(lambda: node.offspring() == {}, 5, f"nobody left, but {node.offspring()}")


def test_a_node_that_lacks_the_model_says_which_it_is_and_tells_the_others(start: Start, tmp_path: Path) -> None:
    """Nodes with the model would wait for its instances until the timeout."""
    node = start("good", 90.0, "model.path=/nowhere")
    node.wait_line("chitu: node 0 .127.0.0.1.: model.path is '/nowhere', but there is no such folder")
    assert node.process.wait(60) == 2
    assert (tmp_path / "told").exists() and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["router.log", "router.progress"])
def test_a_node_that_cannot_write_its_files_tells_the_others(start: Start, tmp_path: Path, name: str) -> None:
    (tmp_path / "logs" / name).mkdir(parents=True)
    node = start()
    node.wait_line(f"chitu node: .*Is a directory: '{tmp_path}/logs/{name}'")
    assert node.process.wait(60) == 1
    assert (tmp_path / "told").exists() and node.offspring() == {}


def test_a_node_that_cannot_find_the_model_at_all_tells_the_others_too(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "chitu.cli", "node", "--node-index", "1", "--model", "a-name/of-the-hub"]
    argv += ["--on-failure", f"touch {tmp_path / 'told'}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert ended.returncode == 2 and "chitu: node 1: --model a-name/of-the-hub: there is no such folder" in ended.stderr
    assert (tmp_path / "told").exists()


def test_a_port_that_only_the_router_would_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-m", "chitu.cli", "node", "--node-index", "0", "--model", str(tmp_path)]
    with ServeProcess(argv) as node:
        node.wait_line("chitu: dp_config.router.stats_port is 0")
        assert node.process.wait(60) == 2
