"""Every fault that can be planted in a node's facts is found, with its cure; a sound node has none."""

from __future__ import annotations

import resource
from typing import Any

import msgspec
import pytest

from chitu.assets import TINY_MODEL_DIR
from chitu.config.load import load_topology
from chitu.config.schema import Topology
from chitu.engine.memory_budget import GIB
from chitu.launch.preflight import Bind, Finding, Level, ModelFacts
from chitu.models.checkpoint import WeightCount
from chitu.models.config import read_model_spec
from chitu.net.rdma_devices import Gid, Rdma
from chitu.process.node_devices import Device, NodeDevices
from chitu.tools.doctor import check_cluster, check_node
from chitu.tools.node_facts import CAP_IPC_LOCK, NodeFacts, memlock_bytes, missing_shared, parse_smi_head

SPEC = read_model_spec(TINY_MODEL_DIR)
A, B = "10.0.0.1", "10.0.0.2"
HOSTS = [f"dp_config.router.host={A}"] + [
    f"dp_config.router.{section}_schedulers.{rank}.host={host}"
    for section, rank, host in (("prefill", 0, B), ("decode", 0, A))
]
PD = "dp_config.router.pd_disaggregation"
CARDS = NodeDevices(tuple(Device(str(k), f"GPU-{k}", "NVIDIA H200", 141 * GIB) for k in range(1)), "nvidia-smi lists 1")
VERSIONS = {
    "torch": "2.11.0",
    "transformers": "5.0",
    "tokenizers": "0.22",
    "pillow": "12.0",
    "pyzmq": "27",
    "msgspec": "0.20",
}
VERSIONS |= {"fastapi": "0.1", "uvicorn": "0.3", "triton": "3.6", "nixl": "1.5.1"}
VERSIONS |= {"mooncake-transfer-engine-cuda13": "0.3.14"}
SOUND = NodeFacts(
    host=A,
    python=(3, 12, 1),
    libraries=VERSIONS,
    torch_cuda="13.0",
    devices=CARDS,
    driver="580.65",
    driver_cuda="13.0",
    compiler="/usr/bin/cc",
    has_python_header=True,
    rdma=Rdma({"mlx5_0": "ACTIVE"}, "nvidia_peermem"),
    available_bytes=64 * GIB,
    binds=(Bind("dp_config.router.port", A, 21003),),
    model=ModelFacts("/models/m", hash="a" * 32, max_model_len=4096, images="b" * 32),
    weights=WeightCount(1 << 20),
    master_addr=A,
)


def topology(*overrides: str) -> Topology:
    return load_topology("pd_disagg_1p1d_multi_node", [*HOSTS, *overrides])


def of(node: NodeFacts, *overrides: str) -> list[Finding]:
    return [f for f in check_node(topology(*overrides), SPEC, node) if f.level is not Level.OK]


def test_a_sound_node_has_nothing_to_mend() -> None:
    assert of(SOUND) == []
    assert of(SOUND, f"{PD}.mooncake_protocol=rdma", f"{PD}.transport=mooncake") == []
    assert check_cluster(topology(), [SOUND]) == []


NO_CARDS = NodeDevices((), "there is no NVIDIA driver here")
ASKED = (f"{PD}.mooncake_protocol=rdma",)
NIXL = (f"{PD}.transport=nixl",)
GIDS = (Gid(0, "fe80::1", "RoCE v2", "eth0"), Gid(1, "10.77.0.1", "RoCE v2", "eth0"))
WITH_GIDS = Rdma({"mlx5_0": "ACTIVE"}, "nvidia_peermem", {"mlx5_0": (1,)}, gids={"mlx5_0": GIDS})
ACTIVE = Rdma({"mlx5_0": "ACTIVE"})
WITHOUT_MOONCAKE = {name: version for name, version in VERSIONS.items() if "mooncake" not in name}
WITHOUT_CUDA = WITHOUT_MOONCAKE | {"mooncake-transfer-engine-non-cuda": "0.3.14"}
FAULTS: list[tuple[str, dict[str, Any], tuple[str, ...], Level, str, str]] = [
    # name, changes of the facts, changes of the topology, level, text of the finding, text of the cure
    ("python", {"python": (3, 10, 4)}, (), Level.ERROR, "3.10.4", "3.11 to 3.14"),
    ("no compiler", {"compiler": ""}, (), Level.ERROR, "no C compiler", "apt-get install gcc"),
    ("compiler, CPUs", {"compiler": "", "devices": NO_CARDS}, (), Level.WARNING, "no C compiler", "gcc"),
    ("no Python.h", {"has_python_header": False}, (), Level.ERROR, "Python.h", "python3-dev"),
    ("old driver", {"driver_cuda": "12.4"}, (), Level.ERROR, "supports CUDA 12.4", "update the driver"),
    ("CPU torch", {"devices": NodeDevices(CARDS.devices, "x", True, "no CUDA")}, (), Level.ERROR, "no CUDA", ""),
    ("too few", {}, ("dp_config.router.decode_schedulers.0.tp_size=4",), Level.ERROR, "1 GPU", ""),
    ("a named card", {}, ("dp_config.router.decode_schedulers.0.devices=[cuda:7]",), Level.ERROR, "cuda:7", ""),
    ("RDMA down", {"rdma": Rdma({"mlx5_0": "DOWN"})}, ASKED, Level.ERROR, "mlx5_0 DOWN", "ibstat"),
    ("RDMA down, auto", {"rdma": Rdma({"mlx5_0": "DOWN"})}, (), Level.WARNING, "KV goes over TCP", "ibstat"),
    ("no RDMA", {"rdma": Rdma()}, ASKED, Level.ERROR, "no RDMA device", "mooncake_protocol=tcp"),
    ("other device", {}, (f"{PD}.ib_device=mlx5_9", *ASKED), Level.ERROR, "mlx5_9", "may name mlx5_0"),
    ("other device, auto", {}, (f"{PD}.ib_device=mlx5_9",), Level.WARNING, "mlx5_9", "may name mlx5_0"),
    ("no peermem", {"rdma": ACTIVE}, ASKED, Level.ERROR, "RDMA cannot reach GPU memory", "modprobe"),
    ("no peermem, auto", {"rdma": ACTIVE}, (), Level.WARNING, "KV goes over TCP", "modprobe"),
    ("memlock", {"memlock_bytes": 64 << 10}, ASKED, Level.ERROR, "may be pinned", "ulimit -l unlimited"),
    (
        "no provider",
        {"rdma": Rdma({"rxe0": "ACTIVE"}, "nvidia_peermem", without_driver=("rxe0",))},
        *(ASKED, Level.ERROR, "libibverbs has no driver for rxe0", "apt-get install libibverbs1 ibverbs-providers"),
    ),
    ("nixl, RDMA down", {"rdma": Rdma({"mlx5_0": "DOWN"})}, NIXL, Level.WARNING, "KV goes over TCP", "ibstat"),
    ("nixl, memlock", {"memlock_bytes": 64 << 10}, NIXL, Level.ERROR, "may be pinned", "ulimit -l unlimited"),
    ("no such GID", {"rdma": WITH_GIDS}, (f"{PD}.gid_index=7",), Level.ERROR, "mlx5_0 has no GID 7", "that all nodes"),
    ("memlock, auto", {"memlock_bytes": 64 << 10}, (), Level.ERROR, "may be pinned", "ulimit -l unlimited"),
    ("no CUDA in Mooncake", {"libraries": WITHOUT_CUDA}, (), Level.ERROR, "has no CUDA", "mooncake-cuda13"),
    ("no Mooncake, auto", {"libraries": WITHOUT_MOONCAKE}, (), Level.ERROR, "extra mooncake is not", ".[mooncake]"),
    (
        "no Mooncake for it",
        {"libraries": WITHOUT_MOONCAKE, "python": (3, 14, 8)},
        *((), Level.ERROR, "extra mooncake is not", "Python 3.11 to 3.13"),
    ),
    ("no memfd", {"shared_memory_error": "not permitted"}, (), Level.ERROR, "memfd_create", "seccomp"),
    (
        "port",
        {"binds": (Bind("dp_config.router.port", A, 21003, "Address already in use"),)},
        *((), Level.ERROR, "Address already in use", "--port"),
    ),
    ("model", {"model": ModelFacts("/m", "model.path: /m is not a folder")}, (), Level.ERROR, "not a folder", ""),
    (
        "images",
        {"model": ModelFacts("/m", hash="a" * 32, why_no_images="the folder has no preprocessor_config.json")},
        *((), Level.WARNING, "requests can have none: the folder has no preprocessor_config.json", ""),
    ),
    ("master", {"master_addr": "127.0.0.1"}, (), Level.ERROR, "loopback", f"the router's address, {A}"),
    ("other master", {"master_addr": "10.9.9.9"}, (), Level.WARNING, "10.9.9.9", "unset it"),
    (
        "card too small",
        {"weights": WeightCount(2000 * GIB)},
        (),
        Level.ERROR,
        "the weights of D0 on cuda:0",
        "larger tp_size",
    ),
    (
        "host too small",
        {"devices": NO_CARDS, "available_bytes": GIB, "weights": WeightCount(50 * GIB)},
        *((), Level.ERROR, "(float32) in each of D0", "smaller model"),
    ),
    (
        "pool too large",
        {"devices": NO_CARDS},
        *(("cache.num_pages=1000000000",), Level.ERROR, "KV pages", ""),
    ),
    ("pool too small", {}, ("cache.num_pages=2",), Level.WARNING, "32 tokens", ""),
]


@pytest.mark.parametrize(
    ("name", "change", "overrides", "level", "says", "cure"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_a_planted_fault_is_found(
    name: str, change: dict[str, Any], overrides: tuple[str, ...], level: Level, says: str, cure: str
) -> None:
    found = of(msgspec.structs.replace(SOUND, **change), *overrides)
    assert any(f.level is level and says in f.says and cure in f.sentence for f in found), found


@pytest.mark.parametrize(
    ("missing", "transport", "level", "cure"),
    [
        ("torch", "auto", Level.ERROR, "script/setup.sh"),
        ("nixl", "nixl", Level.ERROR, ".[nixl]"),
        ("mooncake-transfer-engine-cuda13", "mooncake", Level.ERROR, ".[mooncake]"),
        ("triton", "auto", Level.WARNING, ".[gpu]"),
    ],
)
def test_a_missing_library_is_named_with_what_brings_it(missing: str, transport: str, level: Level, cure: str) -> None:
    rest = {name: version for name, version in VERSIONS.items() if name != missing}
    (found,) = of(msgspec.structs.replace(SOUND, libraries=rest), f"{PD}.transport={transport}")
    assert found.level is level and cure in found.sentence


def test_libraries_of_mooncakes_wheel_are_named_by_their_packages() -> None:
    lacking = msgspec.structs.replace(SOUND, missing_shared=("libnuma1",))
    (found,) = of(lacking, f"{PD}.transport=mooncake")
    assert found.level is Level.ERROR and found.cure.startswith("apt-get install libnuma1; without a GPU")
    lacking = msgspec.structs.replace(lacking, libraries=WITHOUT_CUDA, devices=NO_CARDS)
    (found,) = of(lacking, f"{PD}.transport=mooncake", f"{PD}.mooncake_protocol=tcp")
    assert found.level is Level.ERROR and found.cure == "apt-get install libnuma1"


def test_the_wheels_with_cuda_need_more_libraries() -> None:
    def loads(library: str) -> bool:
        return library == "libibverbs.so.1"

    assert missing_shared(["mooncake-transfer-engine-non-cuda"], loads) == ("libnuma1", "libcurl4")
    assert "ibverbs-providers" in missing_shared(["mooncake-transfer-engine-cuda13"], loads)


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"unreachable": (f"{A}:29800: timed out",)}, Level.ERROR, f"{B} does not reach {A}:29800: timed out"),
        ({"model": ModelFacts("/models/m", hash="b" * 32)}, Level.ERROR, "different models at the same path"),
        (
            {"model": ModelFacts("/models/m", hash="a" * 32, max_model_len=4096, images="c" * 32)},
            *(Level.ERROR, "would make other patches of an image: 10.0.0.1 has bbbbbbbb, 10.0.0.2 has cccccccc"),
        ),
        ({"clock_ahead_s": -70.0}, Level.WARNING, f"clock of {B} is 70.0 s behind"),
        ({"libraries": {**VERSIONS, "torch": "2.13.0"}}, Level.WARNING, "versions differ"),
        ({"host": "10.0.0.9"}, Level.ERROR, f"the node {B} has not reported"),
    ],
)
def test_what_only_two_nodes_together_have_wrong(change: dict[str, Any], level: Level, says: str) -> None:
    twin = msgspec.structs.replace(SOUND, host=B, clock_ahead_s=0.01)
    assert all(f.level is Level.OK for f in check_cluster(topology(), [SOUND, twin]))
    (found,) = (
        f
        for f in check_cluster(topology(), [SOUND, msgspec.structs.replace(twin, **change)])
        if f.level is not Level.OK
    )
    assert found.level is level and says in found.says


def test_what_rdma_needs_is_asked_only_where_mooncake_takes_it() -> None:
    bare = {"rdma": Rdma({"mlx5_0": "DOWN"}), "memlock_bytes": 64 << 10, "libraries": WITHOUT_CUDA}
    assert of(msgspec.structs.replace(SOUND, **bare), f"{PD}.mooncake_protocol=tcp") == []
    assert [f.what for f in of(msgspec.structs.replace(SOUND, **bare))] == ["RDMA"]


@pytest.mark.parametrize(
    ("change", "says", "cure"),
    [
        ({"devices": NO_CARDS}, f"GPUs on {A}; CPUs on {B}", "CUDA_VISIBLE_DEVICES= (empty)"),
        ({"rdma": Rdma()}, f"rdma on {A}; tcp on {B}", "mooncake_protocol=tcp"),
        ({"rdma": ACTIVE}, f"rdma on {A}; tcp on {B}", "mooncake_protocol=tcp"),
    ],
)
def test_unlike_nodes_are_named_before_they_load(change: dict[str, Any], says: str, cure: str) -> None:
    other = msgspec.structs.replace(SOUND, host=B, clock_ahead_s=0.0, **change)
    (found,) = (f for f in check_cluster(topology(), [SOUND, other]) if f.level is not Level.OK)
    assert found.level is Level.ERROR and says in found.says and cure in found.cure
    # A node that has only the router holds no pages.
    alone = [f"dp_config.router.{role}_schedulers.0.host={A}" for role in ("prefill", "decode")]
    of_router = topology(*alone, f"dp_config.router.host={B}")
    assert all(f.level is Level.OK for f in check_cluster(of_router, [other, SOUND]))


@pytest.mark.parametrize(("override", "taken"), [((), 1), ((f"{PD}.gid_index=0",), 0)])
def test_addresses_are_listed_with_the_one_that_is_taken(override: tuple[str, ...], taken: int) -> None:
    facts = msgspec.structs.replace(SOUND, rdma=WITH_GIDS)
    texts = ["0 fe80::1 (RoCE v2, eth0)", "1 10.77.0.1 (RoCE v2, eth0)"]
    texts[taken] += " is taken"
    for library in ("mooncake", "nixl"):
        overrides = (f"{PD}.transport={library}", *override)
        found = [finding.says for finding in check_node(topology(*overrides), SPEC, facts)]
        assert f"GIDs of mlx5_0: {'; '.join(texts)}" in found
        assert f"mlx5_0 ACTIVE; {library} uses mlx5_0" in found


def test_facts_survive_their_way() -> None:
    for facts in (SOUND, msgspec.structs.replace(SOUND, rdma=WITH_GIDS)):
        assert msgspec.json.decode(msgspec.json.encode(facts), type=NodeFacts) == facts


def test_what_the_system_says_is_read() -> None:
    head = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06      CUDA Version: 13.0     |"
    assert parse_smi_head(head) == ("580.65.06", "13.0")
    assert parse_smi_head("") == ("", "")
    assert memlock_bytes(f"CapEff:\t{1 << CAP_IPC_LOCK:016x}\n") == -1
    assert memlock_bytes("CapEff:\t0000000000000000\n") == resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
