"""The supervisor with stand-in processes: which process died, which is restarted, and that none is left behind."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from nursery import forked, launcher, run
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.local import LocalCluster, StartFailed
from chitu.launch.plan import Entries
from chitu.launch.router_calls import ask_health
from chitu.process.child import ROUTER, ChildProcess, ProcessSpec
from chitu.process.descendants import processes_marked
from chitu.process.probes import MAX_CONNECTIONS
from chitu.process.progress import Progress, read_progress, write_progress
from chitu.process.supervisor import Supervisor

STANDINS = Path(__file__).parent / "standins"
ENTRIES = Entries(router="standin_router", scheduler="standin_scheduler")
FORKED = forked(ENTRIES)
WITHOUT_TORCHRUN = replace(FORKED, torchrun=False)
ENVIRONMENT = {"PYTHONPATH": str(STANDINS)}
NOT_FORKED = (True, subprocess.Popen)
"""Parameter of `served` by which the kernel ends the processes with their launcher, not the nursery."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with what the configuration checks require of a model."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


DRAIN = "dp_config.router.pd_disaggregation.deadlines.drain_s=20"
"""Setting by which a process that ends by itself is not killed on a busy machine."""


def cluster(
    model: Path,
    behaviour: str = "good",
    events: list[str] | None = None,
    restart: bool = False,
    entries: Entries = FORKED,
) -> LocalCluster:
    overrides = [f"model.path={model}", f"model.served_name={behaviour}"]
    if behaviour != "stubborn":
        overrides.append(DRAIN)
    topology = load_topology(None, overrides)
    return LocalCluster(
        topology,
        log_dir=str(model / "logs"),
        restart=restart,
        entries=entries,
        env=ENVIRONMENT,
        on_event=(events if events is not None else []).append,
    )


def marks_of(started: LocalCluster) -> list[str]:
    return [member.child.mark for member in started.members.values() if member.child is not None]


def alive(marks: list[str]) -> list[int]:
    return [pid for mark in marks for pid in processes_marked(mark)]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the launcher's temporary folder."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def served(model: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    """Yield `chitu serve` with stand-ins until the test ends; forked, under torchrun, unless a parameter says else."""
    torchrun, popen = getattr(request, "param", (True, launcher))
    with serve_process(model, torchrun, popen=popen) as process:
        yield process


def serve_process(
    model: Path,
    torchrun: bool,
    *options: str,
    behaviour: str = "good",
    log_dir: str = "",
    popen: Callable[..., Any] = launcher,
) -> ServeProcess:
    words = ["--port", "0", "--log-dir", log_dir or str(model / "logs"), *options]
    words += [f"model.path={model}", f"model.served_name={behaviour}"]
    entries = [ENTRIES.router, ENTRIES.scheduler, "torchrun" if torchrun else "direct"]
    argv = [sys.executable, "-m", "forked_chitu", *entries, "serve", *words]
    path = os.pathsep.join([str(STANDINS), os.environ["PYTHONPATH"]])
    return ServeProcess(argv, {"PYTHONPATH": path}, popen=popen)


def test_workers_learn_the_ports_that_the_router_really_has(model: Path) -> None:
    with cluster(model) as started:
        started.wait_ready(60)
        assert started.url == f"http://127.0.0.1:{started.ports['port']}"
        for name in ("P0", "D0"):
            assert f"of router 127.0.0.1:{started.ports['port']}" in started.logs(name)
            assert f"stats port {started.ports['stats_port']}" in started.logs(name)
        assert Path(f"/proc/{started.pid('D0')}/cmdline").read_bytes().count(b"standin_scheduler") == 1
        marks = marks_of(started)
        assert len(alive(marks)) == 5  # router, two torchruns, two schedulers
    assert alive(marks) == []
    assert {member.exit_code for member in started.members.values()} == {0}


def test_a_router_that_starts_again_reports_in_the_same_space(model: Path) -> None:
    """The disk of the logs may be full."""
    with cluster(model, entries=WITHOUT_TORCHRUN) as started:
        started.wait_ready(60)
        (model / "logs" / "full").touch()
        started.kill(ROUTER)
        started.wait_exit(ROUTER)
        started.restart(ROUTER)
        started.wait_ready(20)


def test_a_router_that_dies_as_soon_as_it_serves_comes_back_on_its_ports(model: Path) -> None:
    """The launcher has not seen it alive."""
    with cluster(model, restart=True, entries=WITHOUT_TORCHRUN) as started:
        reported = model / "logs" / "router.progress"
        wait_until(lambda: read_progress(reported).ports, 60, "the router")
        ports = read_progress(reported).ports
        started.kill(ROUTER)
        wait_until(lambda: not started.alive(ROUTER), 20, "its end")
        started.wait_ready(30)
        assert started.ports == ports


def test_a_process_that_dies_before_it_is_ready_ends_the_start_with_its_last_words(model: Path) -> None:
    with cluster(model, "die_at_start") as started, pytest.raises(StartFailed) as caught:
        started.wait_ready(60)
    assert "ended (exit code 3)" in caught.value.message
    assert caught.value.message.endswith("the reason why it ends")


def test_a_death_is_reported_and_the_instance_comes_back_on_request(model: Path) -> None:
    events: list[str] = []
    with cluster(model, events=events) as started:
        started.wait_ready(60)
        first = started.pid("P0")
        report = (model / "logs" / "P0.progress").stat().st_ino
        started.kill("P0")
        started.wait_exit("P0")
        assert events and events[0].startswith("P0 ended (killed by SIGKILL)")
        assert started.alive("D0")
        started.restart("P0")
        started.wait_ready(60)
        assert (model / "logs" / "P0.progress").stat().st_ino == report, "a full disk has no room for a new file"
        assert started.pid("P0") != first
        assert len(events) == 1


@pytest.mark.parametrize(("behaviour", "exit_code"), [("good", 0), ("hung_rank", 1)])
def test_an_instance_that_was_drained_is_not_started_again_and_one_that_got_a_signal_is(
    model: Path, behaviour: str, exit_code: int
) -> None:
    events: list[str] = []
    with cluster(model, behaviour, events, restart=True, entries=WITHOUT_TORCHRUN) as started:
        started.wait_ready(60)
        first = started.pid("P0")
        started.kill("P0", signal.SIGTERM)
        started.wait_exit("P0", 60.0)
        assert events[0].startswith("P0 ended (exit code 0 after a signal; `chitu drain P0` keeps it out)")
        assert "P0 starts again in 0.25 s" in events[0]
        started.wait_ready(60)
        assert started.pid("P0") != first
        events.clear()
        started.kill("P0", signal.SIGUSR1)
        started.wait_exit("P0", 60.0)
        assert events == ["P0 has left: it was drained, and is not started again"]
        member = started.members["P0"]
        assert member.has_left and member.exit_code == exit_code and member.restart_at_s is None
        started.restart("P0")
        started.wait_ready(60)
        assert not member.has_left


def test_logs_are_bounded_private_and_dropped_only_where_nobody_died(model: Path) -> None:
    topology = load_topology(None, [f"model.path={model}", "model.served_name=talkative", "log.max_mb=1"])
    log_dir = model / "deep" / "logs"
    with LocalCluster(topology, log_dir=str(log_dir), entries=WITHOUT_TORCHRUN, env=ENVIRONMENT) as started:
        started.wait_ready(60)
        log, kept = log_dir / "P0.log", log_dir / "P0.log.1"
        for _ in range(25):
            before = log.stat().st_size, kept.exists()
            started.kill("P0", signal.SIGUSR2)
            wait_until(lambda b=before: (log.stat().st_size, kept.exists()) != b, 10, "100 kB")  # type: ignore[misc]
            started.poll()
        assert log.stat().st_size <= (1 << 20) and kept.stat().st_size <= (1 << 20) + 100_001
        assert log.stat().st_size + kept.stat().st_size > 1 << 20
        assert b"\0" not in log.read_bytes(), "it goes on at the beginning"
        assert log_dir.stat().st_mode & 0o777 == 0o700
        assert {
            path.name: path.stat().st_mode & 0o077 for path in log_dir.iterdir() if path.stat().st_mode & 0o077
        } == {}
        started.kill("P0")
        started.wait_exit("P0")
    assert not started.supervisor.remove_logs() and log.exists()


def test_the_end_during_the_start_is_no_death_and_leaves_no_logs(model: Path) -> None:
    with cluster(model, entries=WITHOUT_TORCHRUN) as started:
        log = started.log_dir / "router.log"
        assert log.exists()
    assert started.supervisor.remove_logs() and not log.exists()


def test_a_process_that_cannot_be_started_again_now_is_tried_again(model: Path) -> None:
    events: list[str] = []
    with cluster(model, events=events, restart=True, entries=WITHOUT_TORCHRUN) as started:
        started.wait_ready(60)
        logs = started.log_dir
        logs.rename(model / "away")
        logs.write_text("no folder")
        started.kill("P0")

        def looked(word: str) -> bool:
            started.poll()
            return any(word in event for event in events)

        wait_until(lambda: looked("P0 cannot be started again now"), 30, "a failed start")
        assert started.alive(ROUTER) and started.alive("D0")
        logs.unlink()  # the folder stays missing
        wait_until(lambda: looked("P0 is started again"), 30, "a start")
        wait_until(started.ready, 60, "P0 to be ready")


def supervisor_of(folder: Path, name: str, silent_start: int, events: list[str]) -> Supervisor:
    """Return a supervisor of a process that reports `ready` at each start but one, when it reports no more than
    `warmup`."""
    code = (
        "import signal; from chitu.process.progress import ProgressWriter; progress = ProgressWriter()\n"
        "progress.state('warmup')\n"
        f"if {{start}} != {silent_start}: progress.ready()\n"
        "signal.pause()"
    )
    starts = itertools.count(1)

    def spec_of(_name: str) -> ProcessSpec:
        return ProcessSpec(name, "127.0.0.1", (sys.executable, "-c", code.format(start=next(starts))))

    return Supervisor([name], spec_of, folder, restart=True, on_event=events.append, stalled_s=2.0)


@pytest.mark.parametrize("name", ["P0", ROUTER])
def test_a_process_that_hangs_while_it_starts_again_is_started_once_more(tmp_path: Path, name: str) -> None:
    """Its third start is like the first."""
    events: list[str] = []
    supervisor = supervisor_of(tmp_path, name, 2, events)

    def is_ready() -> bool:
        supervisor.poll()
        return supervisor.member(name).progress.state == "ready"

    try:
        supervisor.start(name)
        wait_until(is_ready, 30, "the first start")
        os.kill(supervisor.child(name).pid, signal.SIGKILL)
        wait_until(lambda: not is_ready(), 30, "the death")
        wait_until(is_ready, 30, "the third start")
    finally:
        supervisor.stop(0.0)
    assert f"{name} hangs: still warmup after 2 s; it is killed" in events


def test_a_first_start_without_progress_is_left_alone(tmp_path: Path) -> None:
    """It may compile kernels for a GPU."""
    events: list[str] = []
    supervisor = supervisor_of(tmp_path, "P0", 1, events)
    member = supervisor.member("P0")

    def warms_up() -> bool:
        supervisor.poll()
        return member.progress.state == "warmup"

    try:
        supervisor.start("P0")
        wait_until(warms_up, 30, "the warm-up")
        member.progressed_s = 0.0
        supervisor.poll()
        assert supervisor.child("P0").exit_code() is None
    finally:
        supervisor.stop(0.0)
    assert not events


def test_a_process_that_cannot_report_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may serve: the disk of the logs is full, and somebody removed its report."""

    def fails(_path: Path, _record: Progress) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("chitu.process.supervisor.write_progress", fails)
    events: list[str] = []
    supervisor = supervisor_of(tmp_path, "D0", 1, events)
    try:
        supervisor.start("D0")
        assert supervisor.member("D0").progressed_s == math.inf
        supervisor.poll()
        assert supervisor.child("D0").exit_code() is None
    finally:
        supervisor.stop(0.0)
    assert not events


def test_without_restarts_a_router_that_dies_while_instances_load_ends_the_start(model: Path) -> None:
    with serve_process(model, False, "--no-restart", behaviour="slow") as process:
        process.wait_line("D0: warmup")
        (router,) = [pid for pid, words in process.offspring().items() if "standin_router" in words]
        os.kill(router, signal.SIGKILL)
        process.wait_line("router ended before the cluster served, and is not started again")
        assert process.process.wait(60) == 1


def test_the_router_comes_back_on_its_ports_by_itself(model: Path) -> None:
    events: list[str] = []
    with cluster(model, events=events, restart=True, entries=WITHOUT_TORCHRUN) as started:
        started.wait_ready(60)
        ports, first = dict(started.ports), started.pid(ROUTER)
        started.kill(ROUTER)
        wait_until(lambda: not Path(f"/proc/{first}").exists() or not started.alive(ROUTER), 5, "the router's death")
        started.poll()
        assert ask_health(started.url) is None
        started.wait_ready(60)
        assert started.ports["port"] == ports["port"]
        assert started.pid(ROUTER) != first
        assert events[0].startswith("router ended (killed by SIGKILL)")
        assert "starts again in 0.25 s" in events[0]


def test_probes_say_whether_all_processes_of_a_launcher_serve(model: Path) -> None:
    events: list[str] = []
    overrides = [f"model.path={model}", "model.served_name=good", DRAIN, "dp_config.probe_port=0"]
    topology, logs = load_topology(None, overrides), model / "logs"
    started = LocalCluster(
        *(topology,), log_dir=str(logs), restart=True, entries=WITHOUT_TORCHRUN, env=ENVIRONMENT, on_event=events.append
    )
    port = started.supervisor.probe_port
    assert port

    def probe(path: str = "/readyz", method: str = "GET") -> tuple[int, str]:
        reply = httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=10, trust_env=False)
        return reply.status_code, reply.text

    assert (probe("/livez")[0], probe()) == (200, (503, '{"status":"unready","reason":"router is dead"}'))
    with started:
        started.wait_ready(60)
        assert probe() == (200, '{"status":"ok","reason":""}') and probe("/readyz", "HEAD") == (200, "")
        assert [probe("/health")[0], probe("/livez", "POST")[0]] == [404, 405]
        reported = read_progress(logs / "D0.progress")
        write_progress(logs / "D0.progress", msgspec.structs.replace(reported, is_member=False))
        assert "D0 is not in the cluster, or drains" in probe()[1]
        write_progress(logs / "D0.progress", reported)
        started.kill("D0")
        started.wait_exit("D0")
        assert probe()[0] == 503 and probe("/livez")[0] == 200
        started.wait_ready(60)
        assert probe()[0] == 200
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS + 1)]
        assert silent[-1].recv(1) == b"", "one too many"
        for connection in silent:
            connection.close()
        wait_until(lambda: probe()[0] == 200, 20, "an answer")
    with pytest.raises(httpx.ConnectError):
        probe()


def test_a_probe_port_that_is_taken_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = [f"dp_config.probe_port={other.getsockname()[1]}", f"model.path={model}"]
        with pytest.raises(ConfigError, match=r"dp_config\.probe_port: cannot listen on 127\.0\.0\.1:"):
            LocalCluster(load_topology(None, taken), log_dir=str(model / "logs"), entries=FORKED)


def test_all_logs_go_to_stdout_a_json_object_a_line(model: Path) -> None:
    """What no process of ours writes, too: torchrun, native libraries, tracebacks."""
    with serve_process(model, True, behaviour="talkative", log_dir="-") as served:
        served.wait_line("Ctrl-C ends it")
        (decode,) = served.pids_of("decode")
        os.kill(decode, signal.SIGUSR2)
        served.wait_line("xxxxx")
        os.kill(decode, signal.SIGKILL)
        served.wait_line(r"D0 ended \(killed by SIGKILL\)")
        served.wait_line("D0 is started again")
        assert served.signal_and_wait(signal.SIGTERM) == 0
        served.wait_line("stopping: waiting for running requests to finish")
    lines = [json.loads(line) for line in served.lines]
    assert {"launcher", "router", "P0", "D0"} <= {line["process"] for line in lines}
    (raw,) = [line["message"] for line in lines if line["message"].startswith("xxxxx")]
    assert (len(raw), raw.strip("x")) == (100_000, "")
    assert all({"time", "process", "level", "module", "message"} <= line.keys() for line in lines)
    assert not (model / "-").exists() and not (model / "logs").exists()


def test_processes_that_ignore_the_signal_are_killed(model: Path) -> None:
    started = cluster(model, "stubborn")
    started.start()
    try:
        started.wait_ready(60)
        marks = marks_of(started)
        assert len(alive(marks)) == 5
    finally:
        codes = started.stop()
    assert codes == {"router": 0, "P0": -signal.SIGKILL, "D0": -signal.SIGKILL}
    assert alive(marks) == []


@pytest.mark.parametrize(
    ("served", "count", "number"),
    [((True, launcher), 5, signal.SIGTERM), ((False, launcher), 3, signal.SIGINT)],
    indirect=["served"],
)
def test_serve_ends_with_0_on_a_signal(served: ServeProcess, count: int, number: signal.Signals) -> None:
    served.wait_line("Ctrl-C ends it")
    assert len(served.offspring()) == count
    assert served.signal_and_wait(number) == 0
    assert served.offspring() == {}


def test_serve_can_be_ended_while_it_starts(served: ServeProcess) -> None:
    served.wait_line("P0: starting")
    assert served.signal_and_wait(signal.SIGTERM) == 0
    assert served.offspring() == {}


@pytest.mark.parametrize("served", [NOT_FORKED], indirect=True)
def test_nobody_outlives_a_supervisor_that_is_killed(temporary: Path, served: ServeProcess) -> None:
    served.wait_line("Ctrl-C ends it")
    assert len(served.offspring()) == 5
    served.signal_and_wait(signal.SIGKILL)
    wait_until(lambda: served.offspring() == {}, 5, f"no orphans, but {served.offspring()}")
    (left,) = temporary.iterdir()
    assert {path.name.split("_")[0].split("-")[0] for path in (left / "P0").iterdir()} >= {"torchelastic", "left"}
    code = (
        f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n"
        "import chitu.process.run_dir as r; r.RunDir().remove()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert list(temporary.iterdir()) == [], "the next launcher removes what the killed one left"


def test_what_a_killed_torchrun_leaves_goes_with_its_launcher(temporary: Path, served: ServeProcess) -> None:
    served.wait_line("Ctrl-C ends it")
    (worker,) = served.pids_of("decode")
    os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
    served.wait_line("D0 is started again")
    wait_until(lambda: served.pids_of("decode") not in ([], [worker]), 30, "a new D0")
    (run_dir,) = temporary.iterdir()
    assert len(list((run_dir / "D0").glob("torchelastic_*"))) <= 1
    served.signal_and_wait(signal.SIGTERM)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("served", [NOT_FORKED], indirect=True)
def test_nobody_outlives_a_supervisor_that_is_killed_during_the_start(served: ServeProcess) -> None:
    wait_until(lambda: any("--role" in command for command in served.offspring().values()), 30, "a torchrun")
    served.signal_and_wait(signal.SIGKILL)
    wait_until(lambda: served.offspring() == {}, 10, f"no orphans, but {served.offspring()}")


@pytest.mark.parametrize("served", [(False, launcher)], indirect=True)
def test_serve_starts_an_instance_again_that_died(served: ServeProcess) -> None:
    served.wait_line("Ctrl-C ends it")
    (first,) = served.pids_of("decode")
    os.kill(first, signal.SIGKILL)
    served.wait_line(r"D0 ended \(killed by SIGKILL\)")
    served.wait_line("D0 is started again")
    wait_until(lambda: served.pids_of("decode") not in ([], [first]), 30, "a new D0")
    assert served.process.poll() is None


def test_a_taken_port_is_told_before_anything_starts(model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        key = "dp_config.router.decode_schedulers.0.port"
        topology = load_topology(None, [f"model.path={model}", f"{key}={taken}"])
        with pytest.raises(ConfigError, match=f"{key}: cannot listen on 127.0.0.1:{taken}: Address already in use"):
            LocalCluster(topology, log_dir=str(model / "logs"), entries=ENTRIES)
    assert not (model / "logs").exists()


def test_a_second_launcher_does_not_write_into_the_logs_of_the_first(model: Path) -> None:
    """It would take the first one's ports for its own, and the first one would restart with its topology."""
    topology = load_topology(None, [f"model.path={model}"])
    first = LocalCluster(topology, log_dir=str(model / "logs"), entries=ENTRIES)
    written = (model / "logs" / "topology.yaml").stat()
    with pytest.raises(ConfigError, match=r"another launcher writes .*/logs/router\.log: give this one another"):
        LocalCluster(topology, log_dir=str(model / "logs"), entries=ENTRIES)
    assert (model / "logs" / "topology.yaml").stat() == written
    with (model / "logs" / "router.log").open("ab") as log:  # on SMB its process could not write if it were locked
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first.stop()
    LocalCluster(topology, log_dir=str(model / "logs"), entries=ENTRIES).stop()


def test_an_instance_whose_port_is_taken_ends_with_one_sentence(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        key = "dp_config.router.decode_schedulers.0.port"
        settings = [f"model.path={model}", f"{key}={other.getsockname()[1]}"]
        argv = [sys.executable, "-m", "chitu.serve.scheduler", "--role", "decode", "--rank", "0", *settings]
        ended = run(argv, os.environ, 60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith(f"D0: {key}: cannot listen on tcp://127.0.0.1:")


def test_one_base_port_for_several_schedulers_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="port of one scheduler process"):
        LocalCluster(load_topology(None, [f"model.path={model}", "dp_config.scheduler_base_port=1"]))


def test_a_log_that_was_deleted_stays_bounded(tmp_path: Path) -> None:
    log = tmp_path / "P0.log"
    child = ChildProcess(ProcessSpec("P0", "", ("sleep", "60")), {}, log, "deleted-log/P0")
    output = Path(f"/proc/{child.pid}/fd/1")
    with output.open("ab") as file:
        file.write(b"x" * 200)
    log.unlink()
    child.bound_log(100)
    size = output.stat().st_size
    child.kill_tree()
    assert (size, (tmp_path / "P0.log.1").read_bytes()) == (0, b"x" * 200)


REPORT = "E1125 18:36:45.001000 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 3)"
FRAME = '  File "/x/torch/distributed/elastic/utils/distributed.py", line 170, in get_socket_with_port'


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        (["of the rank", REPORT, "Traceback", FRAME, "ChildFailedError"], ["of the rank"]),
        (["Traceback", FRAME, "socket.gaierror: Name or service not known"], None),
    ],
    ids=["a rank", "torchrun itself"],
)
def test_the_last_lines_are_those_of_what_failed(tmp_path: Path, log: list[str], tail: list[str] | None) -> None:
    child = ChildProcess(ProcessSpec("D0", "", ("printf", "%s\\n", *log)), {}, tmp_path / "log", "mark")
    wait_until(lambda: child.exit_code() == 0, 20, "its end")
    assert child.tail() == (tail or log)


def test_a_mark_is_found_whole_and_not_as_the_beginning_of_another(tmp_path: Path) -> None:
    mark = f"{tmp_path}/P0/12"
    child = ChildProcess(ProcessSpec("P0", "", ("sleep", "60")), {}, None, mark)
    found = [processes_marked(each) for each in (mark, mark[:-1], mark[1:])]
    child.kill_tree()
    assert found == [[child.pid], [], []] and processes_marked(mark) == []
