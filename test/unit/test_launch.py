"""Launchers: plans and nodes, joins, and the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chitu.assets import TINY_MODEL_DIR
from chitu.cli import main
from chitu.config.load import load_topology
from chitu.config.schema import AUTO_DEVICES, InstanceConfig
from chitu.config.topology import host_names, instances, router_ports, with_router_ports
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.launch.join import by_name, grown, next_rank
from chitu.launch.plan import (
    Entries,
    host_overrides,
    launch_problems,
    open_ports,
    plan,
    specs_on,
    split_hosts,
    with_threads,
)
from chitu.launch.slurm import expand_nodelist
from chitu.net.curve import MAX_SOCKETS
from chitu.process.node_devices import Device, NodeDevices
from chitu.process.progress import Progress, ProgressWriter, read_progress, write_progress
from chitu.process.run_dir import Launched, RunDir, cluster_key_at, running_launchers
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.types import Role

# ----------------------------------------------------------------------------------------------------------------------
# Machines for hosts, node lists of Slurm, and what `chitu plan` prints about them.


NAME = "pd_disagg_2p3d_multi_node"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu7", ["gpu7"]),
        ("pd-node[0-1]", ["pd-node0", "pd-node1"]),
        ("n[08-11,3],login", ["n08", "n09", "n10", "n11", "n3", "login"]),
        ("a[0-1]b[2,4]", ["a0b2", "a0b4", "a1b2", "a1b4"]),
        ("rack[1]-x,rack[2]-x", ["rack1-x", "rack2-x"]),
    ],
)
def test_a_node_list_expands_as_slurm_writes_it(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "a[0-1", "a]0[", "a[x]", "a[0-]", "a[]"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the node list"):
        expand_nodelist(text)


def test_machines_take_the_places_of_the_placeholders_in_their_order() -> None:
    overrides = host_overrides(load_topology(NAME), ["10.0.0.1", "10.0.0.2"])
    topology = load_topology(NAME, overrides)
    router = topology.dp_config.router
    assert router.host == "10.0.0.1"
    assert [instance.host for instance in router.prefill_schedulers] == ["10.0.0.2"] * 2
    assert [instance.host for instance in router.decode_schedulers] == ["10.0.0.1"] * 3
    specs = plan(topology, NAME, overrides, cores=8)
    assert [[spec.name for spec in specs_on(topology, specs, k)] for k in (0, 1)] == [
        ["router", "D0", "D1", "D2"],
        ["P0", "P1"],
    ]
    with pytest.raises(ConfigError, match="node index 2: the topology has 2 hosts, 0 to 1"):
        specs_on(topology, specs, 2)


def test_all_names_of_this_machine_are_one_host() -> None:
    topology = load_topology(None, ["dp_config.router.decode_schedulers.0.host=localhost"])
    moved = load_topology(None, host_overrides(topology, ["10.0.0.5"]))
    assert host_names(moved) == ["10.0.0.5"]


@pytest.mark.parametrize("hosts", [["10.0.0.1"], ["10.0.0.1", "10.0.0.2", "10.0.0.3"]])
def test_as_many_machines_as_hosts_are_needed(hosts: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"has 2 hosts .*, but {len(hosts)} are given"):
        host_overrides(load_topology(NAME), hosts)


@pytest.mark.parametrize(("text", "part"), [("a,,b", "empty entry"), ("a, a", "names a twice"), ("", "empty entry")])
def test_a_wrong_list_of_machines_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        split_hosts(text)


def test_threads_are_given_per_rank() -> None:
    topology = load_topology(NAME, ["dp_config.router.decode_schedulers.1.tp_size=2"])
    threads = {item.name: item.config.threads for item in instances(with_threads(topology, 3))}
    assert threads == {"P0": 3, "P1": 3, "D0": 3, "D1": 6, "D2": 3}


def test_ports_that_other_hosts_could_not_know_are_refused() -> None:
    assert list(launch_problems(load_topology(NAME))) == []
    assert list(launch_problems(load_topology(NAME, ["dp_config.router.token_port=0"]))) == [
        "dp_config.router.token_port is 0 (picked at start), but other hosts have to know it before: give a port"
    ]
    assert list(launch_problems(load_topology(None))) == []
    assert len(list(open_ports(load_topology(None)))) == 5


def test_one_base_port_for_several_instances_is_refused() -> None:
    (problem,) = launch_problems(load_topology(NAME, ["dp_config.scheduler_base_port=29630"]))
    assert problem.startswith("dp_config.scheduler_base_port is the port of one scheduler process")


def test_plan_with_machines_says_who_runs_where_and_how(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(TINY_MODEL_DIR, tmp_path, dirs_exist_ok=True)
    assert main(["plan", NAME, "--hosts", "10.0.0.1,10.0.0.2", "--model", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [["10.0.0.1", "router", "D0", "D1", "D2"], ["10.0.0.2", "P0", "P1"]]
    assert ["10.0.0.2", "29621", "dp_config.router.prefill_schedulers.1.port"] in [line.split() for line in lines]
    at = lines.index("P1 on 10.0.0.2: tp_size 1, devices auto")
    assert "PD_MASTER_ADDR=10.0.0.1" in lines[at + 1]
    assert "-m chitu.serve.scheduler" in lines[at + 2] and "--role prefill --rank 1" in lines[at + 2]
    assert "dp_config.router.host=10.0.0.1" in lines[at + 2]
    node = f"chitu node {NAME} model.path={tmp_path} --hosts 10.0.0.1,10.0.0.2 --node-index"
    assert [line.split(None, 1)[1] for line in lines if "chitu node" in line] == [f"{node} 0", f"{node} 1"]


def test_plan_shows_devices_where_the_hosts_can_be_like_this_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_on(count: int, name: str) -> tuple[int, str, str]:
        cards = NodeDevices(tuple(Device(str(k)) for k in range(count)), "fake", True)
        monkeypatch.setattr("chitu.process.placement.look", lambda: cards)
        hosts = [] if name.endswith("local") else ["--hosts", "10.0.0.1,10.0.0.2"]
        code = main(["plan", name, *hosts])
        return code, *capsys.readouterr()

    code, text, _ = plan_on(8, "pd_disagg_2p3d_gpu")
    assert code == 0
    assert "D2 on 10.0.0.1: tp_size 2, devices cuda:4,cuda:5" in text
    assert "CUDA_VISIBLE_DEVICES=4,5" in text and "P1 on 10.0.0.2: tp_size 2, devices cuda:2,cuda:3" in text
    code, text, _ = plan_on(4, "pd_disagg_2p3d_gpu")
    assert code == 0, "the hosts may have more than this machine"
    assert "D2 on 10.0.0.1: tp_size 2, devices auto" in text
    assert "devices: for hosts like this one: this node has 4 GPUs (fake), but D0, D1, D2 need 6" in text
    code, text, error = plan_on(1, "pd_disagg_1p1d_local")
    assert (code, error.startswith("chitu: this node has 1 GPU (fake), but P0, D0 need 2")) == (2, True)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hosts", "10.0.0.1,127.0.0.1"], "is the loopback address 127.0.0.1"),
        (["--hosts", "10.0.0.1"], "but 1 are given"),
        (["--hosts", "a,b", "dp_config.router.decode_schedulers.2.port=29631"], "are both port 29631 on a"),
        (["--hosts", "a,b", "dp_config.router.bootstrap_port=0"], "unknown key"),
        (["--hosts", "a,b", "dp_config.router.pd_disaggregation.bootstrap_port=0"], "other hosts have to know it"),
        (["--hosts", "a,b", "dp_config.router.decode_schedulers.2.devices=[cpu,cpu]"], "give one device per rank"),
    ],
)
def test_plan_refuses_what_cannot_work(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, *words]) == 2
    assert part in capsys.readouterr().err.splitlines()[0]


# ----------------------------------------------------------------------------------------------------------------------
# From a topology to processes.


DEADLINES = "dp_config.router.pd_disaggregation.deadlines"


def test_the_router_is_a_plain_process_and_an_instance_is_one_torchrun() -> None:
    topology = load_topology("pd_disagg_2p3d_multi_node")
    specs = plan(topology, "F.yaml", ["scheduler.chunk_size=64"], cores=12, entries=Entries(python="python3"))
    assert [spec.name for spec in specs] == ["router", "P0", "P1", "D0", "D1", "D2"]
    assert specs[0].argv == ("python3", "-m", "chitu.serve.api_server", "--config", "F.yaml", "scheduler.chunk_size=64")
    decode_1 = specs[4]
    assert decode_1.host == "node-a.example"
    assert decode_1.argv == (
        *("python3", "-m", "torch.distributed.run", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file"),
        *("--nproc-per-node=1", "--max-restarts=0"),
        *("-m", "chitu.serve.scheduler", "--config", "F.yaml", "--role", "decode", "--rank", "1"),
        "scheduler.chunk_size=64",
    )
    assert decode_1.env["PD_MASTER_ADDR"] == "node-a.example"
    assert decode_1.env["OMP_NUM_THREADS"] == "4"


def test_torchrun_leaves_its_ranks_the_time_to_drain() -> None:
    topology = load_topology(None, [f"{DEADLINES}.drain_s=60.5", f"{DEADLINES}.drain_delay_s=20"])
    decode = plan(topology, "F.yaml", [], cores=4, entries=Entries())[-1]
    assert int(decode.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 81


def test_a_scheduler_without_torch_is_started_by_itself() -> None:
    entries = Entries(scheduler="standin", python="python3", torchrun=False)
    decode = plan(load_topology(None), "F.yaml", [], cores=4, entries=entries)[-1]
    assert decode.argv == ("python3", "-m", "standin", "--config", "F.yaml", "--role", "decode", "--rank", "0")


def test_actual_ports_take_the_place_of_those_of_the_file() -> None:
    ports = {"port": 1001, "stats_port": 1002, "token_port": 1003, "coordination_port": 1004, "bootstrap_port": 1006}
    topology = with_router_ports(load_topology(None), {**ports, "metadata_sync_port": 1005, "other_port": 9})
    assert list(router_ports(topology.dp_config.router).values()) == [1001, 1002, 1003, 1004, 1005, 1006]


def test_the_ports_of_a_router_count_only_when_the_line_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "router.progress"
    ProgressWriter(path).ready(ports={"port": 21003, "stats_port": 4})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read_progress(path) == Progress("starting")
    path.write_bytes(b"[]\n")
    assert read_progress(path) == Progress("starting")


def test_progress_is_the_last_record_and_takes_no_more_space(tmp_path: Path) -> None:
    path = tmp_path / "P0.progress"
    assert read_progress(path) == Progress("starting")
    writer = ProgressWriter(path)
    writer.ready(7, {"stats_port": 65535, "coordination_port": 65535})
    size = path.stat().st_size
    writer.loading(10, 40)
    assert read_progress(path) == Progress("loading", 10, 40)
    writer.loading(11, 40)  # too soon after the last line to write another
    assert read_progress(path) == Progress("loading", 10, 40)
    writer.loading(40, 40)
    assert read_progress(path) == Progress("loading", 40, 40)
    write_progress(path, Progress())
    assert (read_progress(path), path.stat().st_size) == (Progress("starting"), size)


# ----------------------------------------------------------------------------------------------------------------------
# Which instance `chitu join` makes from the router's answer.


ROLES = {role.letter: str(role) for role in Role}


def known(**hosts: str) -> list[InstanceSnapshot]:
    """Return instances, given as P0="127.0.0.1" if up or P0="" if down."""
    return [
        InstanceSnapshot(name, ROLES[name[0]], "up" if host else "down", host, 7, "1", None)
        for name, host in hosts.items()
    ]


def test_the_lowest_rank_that_nobody_has_is_taken() -> None:
    members = known(P0="127.0.0.1", D0="127.0.0.1", D1="", D3="10.0.0.3")
    assert next_rank(members, Role.DECODE) == 2, "D1 is down, but may come back"
    assert next_rank(members, Role.PREFILL) == 1
    assert next_rank(members, Role.UNIFIED) == 0
    assert next_rank(members, Role.DECODE, {2, 4}) == 5


def test_the_new_instance_is_like_the_first_of_its_role_and_others_are_known() -> None:
    topology = load_topology(None, ["dp_config.router.decode_schedulers.0.num_pages=99"])
    members = known(P0="127.0.0.1", D0="127.0.0.1", D1="127.0.0.1", P1="127.0.0.1")
    result = grown(topology, members, Role.DECODE, 2, "127.0.0.1")
    assert [instance.name for instance in instances(result)] == ["P0", "P1", "D0", "D1", "D2"]
    new = instances(result)[-1].config
    assert (new.num_pages, new.host, new.port) == (99, "127.0.0.1", 0)
    assert list(problems(result, need_model=False)) == []
    on_gpus = grown(topology, members, Role.DECODE, 2, "127.0.0.1", ("cuda:1", "cuda:2"))
    assert (instances(on_gpus)[-1].config.devices, instances(on_gpus)[-1].config.tp_size) == (("cuda:1", "cuda:2"), 2)


def test_where_the_first_has_gpus_the_new_one_is_given_others() -> None:
    topology = load_topology(None, ["dp_config.router.decode_schedulers.0.devices=['cuda:1']"])
    result = grown(topology, known(P0="127.0.0.1", D0="127.0.0.1"), Role.DECODE, 1, "127.0.0.1")
    assert [item.config.devices for item in instances(result) if item.role is Role.DECODE] == [
        ("cuda:1",),
        AUTO_DEVICES,
    ]


def test_one_that_is_down_can_be_brought_back_and_one_that_is_up_not() -> None:
    topology = load_topology(None)
    members = known(P0="127.0.0.1", D0="")
    assert instances(grown(topology, members, Role.DECODE, 0, "10.0.0.7"))[-1].config.host == "10.0.0.7"
    with pytest.raises(ConfigError, match="P0 is in the cluster"):
        grown(topology, members, Role.PREFILL, 0, "127.0.0.1")


def test_where_no_instance_of_a_role_is_an_example_it_has_the_default_settings() -> None:
    empty = [f"dp_config.router.{name}_schedulers=[]" for name in ("prefill", "decode")]
    alone = load_topology(None, ["dp_config.router.host=10.0.0.1", *empty])
    first = grown(alone, [], Role.PREFILL, 0, "10.0.0.2")
    assert [(item.name, item.config) for item in instances(first)] == [("P0", InstanceConfig(host="10.0.0.2"))]
    second = grown(alone, known(P0="10.0.0.2", P2="10.0.0.4"), Role.DECODE, 0, "10.0.0.3", ("cpu", "cpu"))
    assert [(item.name, item.config.host) for item in instances(second) if item.engine_rank != 1] == [
        ("P0", "10.0.0.2"),  # so that the transport to other hosts is known
        ("P2", "10.0.0.4"),
        ("D0", "10.0.0.3"),
    ]
    assert instances(second)[-1].config.tp_size == 2
    beside = grown(load_topology(None), known(P0="127.0.0.1", D0="127.0.0.1"), Role.UNIFIED, 0, "127.0.0.1")
    assert [item.name for item in instances(beside)] == ["P0", "D0", "U0"]
    assert list(problems(first, need_model=False)) == list(problems(beside, need_model=False)) == []


def test_a_router_is_known_by_the_name_that_leads_to_it_so_it_may_move() -> None:
    name = socket.gethostname()
    address = socket.gethostbyname(name)
    topology = load_topology(None, [f"dp_config.router.host={address}"])
    for url, host in [
        (f"http://{name}:21003/path", name),
        (f"http://{address}:21003", address),
        ("http://absent.invalid:21003", address),  # such as a proxy in front of it
        ("https://a..b", address),
    ]:
        assert by_name(topology, url).dp_config.router.host == host
    local = load_topology(None)
    assert by_name(local, "http://localhost:21003") is local


def test_what_cannot_be_added_is_refused() -> None:
    topology, members = load_topology(None), known(P0="127.0.0.1", D0="127.0.0.1")
    assert len(instances(grown(topology, members, Role.DECODE, 5000, "127.0.0.1"))) == 5002
    for rank in (-1, MAX_SOCKETS):
        with pytest.raises(ConfigError, match=f"the rank {rank} is not from 0 to"):
            grown(topology, members, Role.DECODE, rank, "127.0.0.1")


# ----------------------------------------------------------------------------------------------------------------------
# A launcher's own folder is made again if the temporary folder was cleaned while the launcher runs.


PORT, KEY = 21003, "a cluster key of some length"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


@pytest.fixture
def folder(temporary: Path) -> Iterator[RunDir]:
    folder = RunDir()
    folder.keep_key(PORT, KEY)
    yield folder
    folder.remove()


def test_a_process_gets_its_folder_after_the_temporary_folder_was_cleaned(temporary: Path, folder: RunDir) -> None:
    first = folder.make_empty("P0")
    shutil.rmtree(folder.path)
    assert folder.make_empty("P0") == first
    assert first.is_dir() and first.stat().st_mode & 0o777 == 0o700
    assert cluster_key_at(PORT) == KEY
    RunDir().remove()
    assert first.is_dir(), "the next launcher did not take it as abandoned"


def test_a_folder_that_a_process_of_this_launcher_has_made_again_is_locked_again(
    temporary: Path, folder: RunDir
) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir(mode=0o700)  # the router's supervisor has its own folder in it
    folder.make_empty("P0")
    assert cluster_key_at(PORT) == KEY


def test_a_folder_of_another_user_is_not_taken(
    temporary: Path, folder: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(OSError, match="belongs to another user"):
            folder.make_empty("P0")
    assert list(folder.path.iterdir()) == []


def test_commands_find_what_the_launchers_that_live_run(temporary: Path, folder: RunDir) -> None:
    assert running_launchers() == []
    own = Launched("http://127.0.0.1:21003", ("P0", "D0"), KEY)
    folder.keep_launched(own)
    killed = temporary / "chitu-run-killed"
    killed.mkdir()
    (killed / "launched.json").write_bytes((folder.path / "launched.json").read_bytes())
    (temporary / "chitu-run-broken").mkdir()
    assert running_launchers() == [own]
    assert (folder.path / "launched.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_on_a_file_system_without_locks_is_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # NFS: the folder is not open for writing

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunDir()
    assert [path.name for path in temporary.iterdir()] == [folder.path.name]
    (folder.path / "P0").write_text("a file where a folder shall be")
    assert folder.make_empty("P0").is_dir()
    RunDir().remove()
    assert folder.path.is_dir(), "the next launcher did not take it as abandoned"
    folder.remove()
