"""RDMA or TCP, and how KV travels: what the machine has, what is chosen and logged, what is refused before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import instances
from chitu.errors import ConfigError
from chitu.launch.plan import host_overrides
from chitu.net.rdma_devices import Rdma, has_efa, look_at_rdma, why_no_rdma
from chitu.process.placement import KEY, chosen_protocol, describe_transports, place, why_not_sent

PD = "dp_config.router.pd_disaggregation"
NOTHING = Rdma()
DOWN = Rdma({"mlx5_0": "DOWN"})
ACTIVE = Rdma({"mlx5_0": "ACTIVE", "mlx5_1": "DOWN"})
DIRECT = Rdma({"mlx5_0": "ACTIVE"}, "nvidia_peermem")
NO_DEVICE = "this host has no RDMA device (nothing in /sys/class/infiniband)"
NO_GPU_MEMORY = "RDMA cannot reach GPU memory here: neither nvidia_peermem nor the driver's dma-buf is there"


def two_nodes(kind: str, *overrides: str) -> Topology:
    name = "pd_disagg_1p1d_multi_node"
    hosts = host_overrides(load_topology(name), ["10.0.0.1", "10.0.0.2"])
    devices = [f"dp_config.router.{role}_schedulers.0.devices=[{kind}]" for role in ("prefill", "decode")]
    return load_topology(name, [*hosts, *devices, *overrides])


def test_devices_are_found_with_the_state_of_their_ports(tmp_path: Path) -> None:
    for name, port, state in (("mlx5_0", "1", "1: DOWN"), ("mlx5_0", "2", "4: ACTIVE"), ("mlx5_1", "1", "2: INIT")):
        folder = tmp_path / name / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    (tmp_path / "rxe0").mkdir()
    assert look_at_rdma(tmp_path).devices == {"mlx5_0": "ACTIVE", "mlx5_1": "INIT", "rxe0": "without a port"}
    assert look_at_rdma(tmp_path / "none").devices == {}


def test_an_efa_is_told_by_its_driver(tmp_path: Path) -> None:
    """Its devices have names like others' (`rdmap0s6`)."""
    assert not has_efa(tmp_path / "none")
    for device, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "class" / device / "device").mkdir(parents=True)
        (tmp_path / "class" / device / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        assert has_efa(tmp_path / "class") == (driver == "efa")


@pytest.mark.parametrize(
    ("found", "ib_device", "has_gpus", "reason"),
    [
        (NOTHING, "", False, NO_DEVICE),
        (DOWN, "", False, "no RDMA device that may be used has an active port (mlx5_0 DOWN)"),
        (ACTIVE, "", False, ""),
        (ACTIVE, "mlx5_0, mlx5_1", False, ""),
        (ACTIVE, "mlx5_1", False, "no RDMA device that may be used has an active port"),
        (ACTIVE, "mlx5_7", False, "pd_disaggregation.ib_device names mlx5_7, and this host has mlx5_0 ACTIVE"),
        (ACTIVE, "", True, NO_GPU_MEMORY),
        (DIRECT, "", True, ""),
    ],
)
def test_what_stands_against_rdma(found: Rdma, ib_device: str, has_gpus: bool, reason: str) -> None:
    said = why_no_rdma(found, ib_device, has_gpus)
    assert said.startswith(reason) and bool(said) == bool(reason)


@pytest.mark.parametrize(
    ("kind", "found", "protocol", "words"),
    [
        ("cpu", NOTHING, "tcp", f"mooncake over tcp between hosts ({NO_DEVICE})"),
        ("cpu", ACTIVE, "rdma", "mooncake over rdma between hosts (mlx5_0 active)"),
        ("cuda:0", ACTIVE, "tcp", f"mooncake over tcp between hosts ({NO_GPU_MEMORY}), staged through host memory"),
        (
            *("cuda:0", DIRECT, "rdma"),
            "mooncake over rdma between hosts (mlx5_0 active, GPU memory by nvidia_peermem), straight from GPU memory "
            "(needs Mooncake's build with CUDA)",
        ),
    ],
)
def test_the_protocol_is_chosen_by_what_the_node_has(kind: str, found: Rdma, protocol: str, words: str) -> None:
    topology = two_nodes(kind)
    assert chosen_protocol(topology, found) == protocol
    assert describe_transports(topology, found) == words
    assert "as the topology says" in describe_transports(two_nodes(kind, f"{KEY}=tcp"), found)


SIZES = [f"dp_config.router.{role}_schedulers.0.tp_size=2" for role in ("prefill", "decode")]


@pytest.mark.parametrize(
    ("topology", "protocol", "sent_from", "is_slow"),
    [
        (two_nodes("cuda:0"), "tcp", "", False),
        (two_nodes("cuda:0"), "rdma", "over rdma", False),
        (two_nodes("cuda:0", f"{PD}.transfer=direct"), "tcp", f"with {PD}.transfer direct", True),
        (two_nodes("cuda:0,cuda:1", *SIZES), "tcp", "with tp_size above 1", True),
        (two_nodes("cuda:0,cuda:1", *SIZES), "rdma", "with tp_size above 1", False),
        (two_nodes("cpu,cpu", *SIZES), "tcp", "", False),
        (two_nodes("cuda:0,cuda:1", *SIZES, f"{PD}.transport=nixl"), "tcp", "", False),
    ],
)
def test_kv_that_leaves_a_gpu_itself_needs_a_build_with_cuda(
    topology: Topology, protocol: str, sent_from: str, is_slow: bool
) -> None:
    error, warning = why_not_sent(topology, protocol, has_cuda_build=False)
    assert (sent_from in error, "no CUDA" in error, warning) == (True, bool(sent_from), "")
    error, warning = why_not_sent(topology, protocol, has_cuda_build=True)
    assert error == "" and ("piece by piece" in warning) == is_slow


def test_the_plan_says_what_is_not_staged() -> None:
    words = describe_transports(two_nodes("cuda:0,cuda:1", *SIZES), NOTHING)
    assert "staged" not in words and "piece by piece, which is slow (needs Mooncake's build with CUDA)" in words
    assert "slow" not in describe_transports(two_nodes("cuda:0,cuda:1", *SIZES), DIRECT)


def test_rdma_that_was_asked_for_and_is_not_there_is_refused() -> None:
    for kind, found, reason in (("cpu", NOTHING, "no RDMA device"), ("cuda:0", ACTIVE, "cannot reach GPU memory")):
        with pytest.raises(ConfigError, match=rf"{KEY} is rdma, but .*{reason}.*: use auto or tcp"):
            chosen_protocol(two_nodes(kind, f"{KEY}=rdma"), found)
    assert chosen_protocol(two_nodes("cpu", f"{KEY}=rdma"), ACTIVE) == ""
    assert chosen_protocol(two_nodes("cpu", f"{KEY}=rdma", f"{PD}.transport=nixl"), NOTHING) == "", "not Mooncake's"


def test_on_one_host_memory_is_shared_and_no_library_asked() -> None:
    topology = load_topology(None)
    assert describe_transports(topology, ACTIVE) == "shm on one host"
    assert chosen_protocol(topology, ACTIVE) == ""
    gpus = [f"dp_config.router.{role}_schedulers.0.devices=[cuda:0]" for role in ("prefill", "decode")]
    assert describe_transports(load_topology(None, gpus), ACTIVE).startswith("cuda_ipc on one host")
    assert describe_transports(load_topology("unified_local"), ACTIVE) == ""


def test_all_processes_of_a_node_are_told_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chitu.process.placement.look_at_rdma", lambda: ACTIVE)
    overrides = [f"{PD}.transport=mooncake", "dp_config.router.prefill_schedulers.0.devices=cpu"]
    placement = place(None, overrides, instances)
    assert placement.topology.dp_config.router.pd_disaggregation.mooncake_protocol == "rdma"
