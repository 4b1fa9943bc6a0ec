"""RDMA or TCP, and how KV travels: what the machine has, what is chosen and logged, what is refused before a start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.config.topology import instances
from chitu.config.topology_checks import problems
from chitu.config.transport_env import RELIED_ON, transport_environment
from chitu.errors import ConfigError
from chitu.kv_transfer.transports.mooncake import FORCED_ENVIRONMENT
from chitu.launch.plan import host_overrides
from chitu.net.rdma_devices import Gid, Rdma, automatic_gid, look_at_rdma, why_no_rdma
from chitu.process.placement import KEY, chosen_protocol, describe_transports, place, why_not_sent

PD = "dp_config.router.pd_disaggregation"
NOTHING = Rdma()
DOWN = Rdma({"mlx5_0": "DOWN"})
ACTIVE = Rdma({"mlx5_0": "ACTIVE", "mlx5_1": "DOWN"})
DIRECT = Rdma({"mlx5_0": "ACTIVE"}, "nvidia_peermem")
OPEN = "; mooncake's ports ask for no key (docs/security.md)"
NO_DEVICE = "this host has no RDMA device (nothing in /sys/class/infiniband)"
NO_GPU_MEMORY = "RDMA cannot reach GPU memory here: neither nvidia_peermem nor the driver's dma-buf is there"


def two_nodes(kind: str, *overrides: str) -> Topology:
    name = "pd_disagg_1p1d_multi_node"
    hosts = host_overrides(load_topology(name), ["10.0.0.1", "10.0.0.2"])
    devices = [f"dp_config.router.{role}_schedulers.0.devices=[{kind}]" for role in ("prefill", "decode")]
    return load_topology(name, [*hosts, *devices, *overrides])


def plant(
    folder: Path, device: str, port: int, state: str, driver: str = "", gids: Sequence[tuple[str, ...]] = ()
) -> None:
    """Write a port of a device as /sys/class/infiniband shows it. `gids`: address, type, network device."""
    there = folder / "class" / device / "ports" / str(port)
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (there / part).mkdir(parents=True)
    (there / "state").write_text(f"{state}\n")
    for index, values in enumerate(gids):
        for part, value in zip(("gids", "gid_attrs/types", "gid_attrs/ndevs"), values, strict=False):
            (there / part / str(index)).write_text(f"{value}\n")
    if driver:
        (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "class" / device / "device").mkdir(exist_ok=True)
        (folder / "class" / device / "device/driver").symlink_to(folder / "drivers" / driver)


LOCAL, V4, V6 = "fe80:0:0:0:1:2:3:4", "0000:0000:0000:0000:0000:ffff:0a4d:0001", "2001:0db8:0:0:0:0:0:1"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def test_devices_are_found_with_ports_drivers_and_addresses(tmp_path: Path) -> None:
    plant(tmp_path, "mlx5_0", 1, "1: DOWN", "mlx5_core")
    plant(tmp_path, "mlx5_0", 2, "4: ACTIVE", gids=[(LOCAL, V1, "eth0"), (V4, V2, "eth0"), (ZERO,)])
    plant(tmp_path, "mlx5_1", 1, "2: INIT")
    plant(tmp_path, "rxe0", 1, "4: ACTIVE")
    (tmp_path / "class" / "odd").mkdir()
    found = look_at_rdma(tmp_path / "class", lambda: ["mlx5_0", "mlx5_1"])
    assert found.devices == {"mlx5_0": "ACTIVE", "mlx5_1": "INIT", "odd": "without a port", "rxe0": "ACTIVE"}
    assert (found.ports["mlx5_0"], found.drivers) == ((2,), {"mlx5_0": "mlx5_core"})
    assert found.gids["mlx5_0"] == (Gid(0, "fe80::1:2:3:4", V1, "eth0"), Gid(1, "10.77.0.1", V2, "eth0"))
    assert found.without_driver == ("rxe0",) and found.active == ["mlx5_0"]
    assert "no driver for rxe0 (Debian: apt-get install libibverbs1 ibverbs-providers)" in why_no_rdma(found, ["rxe0"])
    assert look_at_rdma(tmp_path / "class", lambda: None).active == [], "without libibverbs no device can be used"
    assert look_at_rdma(tmp_path / "none").devices == {}


@pytest.mark.parametrize(
    ("gids", "of_mooncake", "of_ucx"),
    [
        ([(LOCAL, V2), (V4, V2)], 1, 1),
        ([(LOCAL, V1), (LOCAL, V2), (V4, V1), (V4, V2)], 3, 3),
        ([(V4, V1), (LOCAL, V2), (V6, V2)], 2, 2),
        ([(V4, V2), (V6, V2)], 1, 0),  # to Mooncake, 10.0.0.0/8 is private and a global IPv6 address is not
        ([(ZERO, V2)], None, None),
    ],
)
def test_the_address_that_a_library_takes_by_itself(
    gids: list[tuple[str, str]], of_mooncake: int | None, of_ucx: int | None, tmp_path: Path
) -> None:
    plant(tmp_path, "mlx5_0", 1, "4: ACTIVE", gids=[(*gid, "eth0") for gid in gids])
    found = look_at_rdma(tmp_path / "class", lambda: ["mlx5_0"]).gids["mlx5_0"]
    assert (automatic_gid(found, "mooncake"), automatic_gid(found, "nixl")) == (of_mooncake, of_ucx)


@pytest.mark.parametrize(
    ("found", "ib_device", "has_gpus", "reason"),
    [
        (NOTHING, [], False, NO_DEVICE),
        (DOWN, [], False, "no RDMA device that may be used has an active port (mlx5_0 DOWN)"),
        (ACTIVE, [], False, ""),
        (ACTIVE, ["mlx5_0", "mlx5_1"], False, ""),
        (ACTIVE, ["mlx5_1"], False, "no RDMA device that may be used has an active port"),
        (ACTIVE, ["mlx5_7"], False, "pd_disaggregation.ib_device names mlx5_7, and this host has mlx5_0 ACTIVE"),
        (ACTIVE, [], True, NO_GPU_MEMORY),
        (DIRECT, [], True, ""),
    ],
)
def test_what_stands_against_rdma(found: Rdma, ib_device: list[str], has_gpus: bool, reason: str) -> None:
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
    assert describe_transports(topology, found) == f"{words}{OPEN}"
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


def test_a_plan_for_other_machines_says_what_the_topology_says() -> None:
    """`chitu plan` on a machine without RDMA, for nodes that have it."""
    asked = two_nodes("cpu", f"{KEY}=rdma")
    words = f"as the topology says, but {NO_DEVICE}: a node like this one refuses to start"
    assert describe_transports(asked, NOTHING) == f"mooncake over rdma between hosts ({words}){OPEN}"
    assert describe_transports(asked, ACTIVE) == f"mooncake over rdma between hosts (mlx5_0 active){OPEN}"


WITHOUT_DRIVER = Rdma({"rxe0": "ACTIVE"}, without_driver=("rxe0",))
OF_WHEEL = Rdma({"mlx5_0": "ACTIVE"}, drivers={"mlx5_0": "mlx5_core"}, without_driver=("mlx5_0",))


@pytest.mark.parametrize(
    ("found", "overrides", "words"),
    [
        (NOTHING, (), f"over tcp ({NO_DEVICE})"),
        (ACTIVE, (), "over rdma (mlx5_0 active)"),
        (ACTIVE, ("ib_device=[mlx5_1]",), "over tcp (no RDMA device that may be used has an active port"),
        (WITHOUT_DRIVER, (), "over tcp (libibverbs has no driver for rxe0 (Debian:"),
        (OF_WHEEL, (), "over rdma (mlx5_0 active)"),  # its wheel has this driver
        (ACTIVE, ("transport_env.UCX_TLS=tcp",), "over what UCX_TLS=tcp allows"),
    ],
)
def test_the_plan_says_what_nixl_goes_over(found: Rdma, overrides: tuple[str, ...], words: str) -> None:
    topology = two_nodes("cpu", f"{PD}.transport=nixl", *(f"{PD}.{item}" for item in overrides))
    assert describe_transports(topology, found).startswith(f"nixl {words}")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ib_device='mlx5_0,mlx5_1'", "ib_device has 'mlx5_0,mlx5_1', which is no name of a device: give a list"),
        (
            "transport_env.LD_PRELOAD=/x.so",
            "transport_env.LD_PRELOAD: only variables of Mooncake and NIXL are set here",
        ),
        ("transport_env.MC_GID_INDEX=3", f"transport_env.MC_GID_INDEX has a key of its own: {PD}.gid_index"),
        ("transport_env.MC_TRANSFER_TIMEOUT=5", "transport_env.MC_TRANSFER_TIMEOUT cannot be set"),
        ("transport_env.UCX_TLS=''", "transport_env.UCX_TLS is empty"),
    ],
)
def test_a_setting_of_the_libraries_that_cannot_work_is_named(setting: str, words: str) -> None:
    (problem,) = problems(load_topology(None, [f"{PD}.{setting}"]), need_model=False)
    assert problem.startswith(f"{PD}.{words}")


def test_devices_have_one_key() -> None:
    both = load_topology(None, [f"{PD}.ib_device=[mlx5_0]", f"{PD}.transport_env.UCX_NET_DEVICES=eth0"])
    (problem,) = problems(both, need_model=False)
    assert "UCX_NET_DEVICES and " in problem and "both name devices" in problem
    assert load_topology(None, [f"{PD}.ib_device=mlx5_0"]).dp_config.router.pd_disaggregation.ib_device == ("mlx5_0",)


def test_the_libraries_get_the_topologys_variables_and_keep_what_fences_need() -> None:
    settings = [f"{PD}.transport_env={{MC_WORKERS_PER_CTX: 4, UCX_TLS: 'rc,tcp'}}", f"{PD}.gid_index=3"]
    topology = load_topology(None, settings)
    assert not list(problems(topology, need_model=False))
    assert transport_environment(topology.dp_config.router.pd_disaggregation) == {
        "MC_WORKERS_PER_CTX": "4",
        "UCX_TLS": "rc,tcp",
        "MC_GID_INDEX": "3",
        "UCX_IB_GID_INDEX": "3",
    }
    assert FORCED_ENVIRONMENT.keys() <= RELIED_ON


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
