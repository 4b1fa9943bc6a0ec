"""Machines for hosts, node lists of Slurm, and what `chitu plan` prints about them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chitu.assets import TINY_MODEL_DIR
from chitu.cli import main
from chitu.config.load import load_topology
from chitu.config.topology import host_names, instances
from chitu.errors import ConfigError
from chitu.launch.plan import host_overrides, launch_problems, open_ports, plan, specs_on, split_hosts, with_threads
from chitu.launch.slurm import expand_nodelist
from chitu.process.node_devices import Device, NodeDevices

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
