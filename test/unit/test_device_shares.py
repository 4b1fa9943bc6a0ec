"""`devices: auto`: which instance gets which GPUs of a node, what its processes see, and what is refused at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from chitu.config.devices import on_visible_devices, with_step_sizes
from chitu.config.load import dump_topology, load_topology
from chitu.config.schema import Topology
from chitu.config.topology import find_instance, instances, instances_on
from chitu.errors import ConfigError
from chitu.launch.plan import Entries, host_overrides, plan
from chitu.process.node_devices import Device, NodeDevices, with_torch
from chitu.process.placement import (
    SHOWN,
    DeviceAssignment,
    assign_devices,
    describe,
    environment_of,
    place,
    with_shares,
)
from chitu.types import Role

A, B = "10.0.0.1", "10.0.0.2"
NONE = NodeDevices((), "there is no NVIDIA driver here")
BROKEN = with_torch(NodeDevices((Device("0"), Device("1")), "nvidia-smi lists 2"), "2.13.0+cpu", None)


def node(count: int, is_given: bool = True, first: int = 0) -> NodeDevices:
    return NodeDevices(tuple(Device(str(first + k), name="NVIDIA H200") for k in range(count)), "fake", is_given)


def two_nodes(*overrides: str) -> Topology:
    """Return a 2P3D topology on two nodes, with two ranks an instance."""
    name = "pd_disagg_2p3d_gpu"
    return load_topology(name, [*host_overrides(load_topology(name), [A, B]), *overrides])


def pair(*overrides: str) -> Topology:
    return load_topology(None, list(overrides))


def shares(topology: Topology, found: NodeDevices, host: str = "127.0.0.1") -> DeviceAssignment:
    return assign_devices(topology, instances_on(topology, host), found)


def by_name(topology: Topology, found: DeviceAssignment) -> dict[str, str]:
    return {item.name: ",".join(found.devices.get(item.key, ("?",))) for item in instances(topology)}


def test_two_gpus_a_rank_pair_in_the_order_of_the_topology() -> None:
    topology = two_nodes()
    elsewhere = "cuda:other,cuda:other"
    of_a = shares(topology, node(8), A)
    assert by_name(topology, of_a) == {
        **dict.fromkeys(("P0", "P1"), elsewhere),
        **{"D0": "cuda:0,cuda:1", "D1": "cuda:2,cuda:3", "D2": "cuda:4,cuda:5"},
    }
    assert of_a.notes == ("2 GPUs of 8 stay idle (6,7)",)
    of_b = shares(topology, node(4), B)
    assert by_name(topology, of_b) == {
        **{"P0": "cuda:0,cuda:1", "P1": "cuda:2,cuda:3"},
        **dict.fromkeys(("D0", "D1", "D2"), elsewhere),
    }
    assert of_b.notes == ()
    for found in (of_a, of_b):  # as the node's processes read it
        overrides = [f"{key}.devices=[{','.join(names)}]" for key, names in found.devices.items()]
        assert two_nodes(*overrides) == with_step_sizes(with_shares(topology, found), ())


def test_every_process_is_shown_its_own_gpus_and_no_others() -> None:
    topology = with_shares(two := two_nodes(), shares(two, node(6, first=2), A))
    specs = plan(topology, "F.yaml", [], 8, Entries(), node(6, first=2))
    seen = {
        spec.name: {key: spec.env[key] for key in (SHOWN, "CUDA_VISIBLE_DEVICES") if key in spec.env} for spec in specs
    }
    assert seen == {
        **{"router": {}, "P0": {}, "P1": {}},
        "D0": {SHOWN: "cuda:0,cuda:1", "CUDA_VISIBLE_DEVICES": "2,3"},
        "D1": {SHOWN: "cuda:2,cuda:3", "CUDA_VISIBLE_DEVICES": "4,5"},
        "D2": {SHOWN: "cuda:4,cuda:5", "CUDA_VISIBLE_DEVICES": "6,7"},
    }
    assert describe(instances_on(topology, A), node(6, first=2)) == "D0 on GPU 2,3; D1 on GPU 4,5; D2 on GPU 6,7"
    config = find_instance(topology, Role.DECODE, 1).config
    assert on_visible_devices(config, ("cuda:2", "cuda:3")).devices == ("cuda:0", "cuda:1"), "there they count from 0"
    assert on_visible_devices(config, ()) == config, "without a launcher a process sees all"


def test_who_counts_the_gpus_numbers_them() -> None:
    (instance, *_) = instances(pair("dp_config.router.prefill_schedulers.0.devices=[cuda:1]"))
    assert environment_of(instance, node(2)) == {"CUDA_VISIBLE_DEVICES": "1", SHOWN: "cuda:1"}
    assert environment_of(instance, node(2, is_given=False))["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment_of(instance, node(1)) == {}, "a plan for another machine"


def test_what_was_decided_makes_the_step_sizes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for found, tokens in ((node(2), 8192), (NONE, 2048)):
        monkeypatch.setattr("chitu.process.placement.look", lambda found=found: found)
        placement = place(None, [], instances)
        assert placement.topology.scheduler.max_batched_tokens == tokens
        file = tmp_path / "topology.yaml"
        file.write_text(dump_topology(placement.topology))
        assert load_topology(str(file)) == placement.topology, "for every process the same"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (5, "this node has 5 GPUs (fake), but D0, D1, D2 need 6 (tp_size 2)"),
        (1, "this node has 1 GPU (fake), but D0, D1, D2 need 6 (tp_size 2)"),
    ],
)
def test_too_few_gpus_are_refused(count: int, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shares(two_nodes(), node(count), A)
    assert words in refused.value.message


def test_to_share_one_gpu_must_be_said_and_the_refusal_says_how() -> None:
    with pytest.raises(ConfigError) as refused:
        shares(pair(), node(1))
    words = refused.value.message.partition("say so: ")[2].split()
    assert words == [f"dp_config.router.{role}_schedulers.0.devices=[cuda:0]" for role in ("prefill", "decode")]
    said = pair(*words)
    assert shares(said, node(1)) == DeviceAssignment({}, ("P0 and D0 share cuda:0",))
    topology = with_shares(said, shares(said, node(1)))
    assert {environment_of(item, node(1))["CUDA_VISIBLE_DEVICES"] for item in instances(topology)} == {"0"}


def test_named_gpus_are_not_given_to_others() -> None:
    topology = pair("dp_config.router.decode_schedulers.0.devices=[cuda]")
    assert by_name(topology, shares(topology, node(2)))["P0"] == "cuda:1"
    with pytest.raises(ConfigError, match=r"this node has 1 GPU \(fake\), of which 0 are free, but P0 need 1"):
        shares(topology, node(1))
    with pytest.raises(ConfigError, match=r"decode_schedulers\.0\.devices names cuda:3, but this node has 2"):
        shares(pair("dp_config.router.decode_schedulers.0.devices=[cuda:3]"), node(2))


def test_a_node_without_gpus_serves_on_cpus_and_says_so() -> None:
    topology = two_nodes()
    found = shares(topology, NONE, A)
    assert set(by_name(topology, found).values()) == {"cpu,cpu"}
    assert found.notes == ("D0, D1, D2 on CPUs, in float32: this node has no GPU (there is no NVIDIA driver here)",)
    (note,) = shares(two_nodes("model.dtype=bfloat16"), NONE, A).notes
    assert note.startswith("D0, D1, D2 on CPUs, in bfloat16: ")


def test_gpus_that_torch_cannot_use_are_told_and_refused_where_somebody_gave_them() -> None:
    topology = pair()
    found = shares(topology, BROKEN)
    assert set(by_name(topology, found).values()) == {"cpu"}
    assert "torch 2.13.0+cpu is built without CUDA" in found.notes[0]
    given = NodeDevices(BROKEN.devices, "fake", True, BROKEN.problem)
    for wanted, state in ((topology, given), (pair("dp_config.router.prefill_schedulers.0.devices=[cuda:0]"), BROKEN)):
        with pytest.raises(ConfigError, match="is built without CUDA"):
            shares(wanted, state)


@pytest.mark.parametrize("devices", ["cpu", "cuda:0"])
def test_p_and_d_follow_those_that_name_their_devices(devices: str) -> None:
    topology = pair(f"dp_config.router.decode_schedulers.0.devices=[{devices}]")
    assert by_name(topology, shares(topology, node(2)))["P0"] == ("cpu" if devices == "cpu" else "cuda:1")
    if devices != "cpu":
        remote = two_nodes("dp_config.router.decode_schedulers.0.devices=[cuda:0,cuda:1]")
        with pytest.raises(ConfigError, match="P0, P1: other P and D have GPUs, but this node has no GPU"):
            shares(remote, NONE, B)


def test_parts_of_a_gpu_are_for_one_rank_each() -> None:
    parts = NodeDevices(tuple(Device(f"MIG-{k}", is_mig=True) for k in range(2)), "fake")
    topology = pair()
    alone = with_shares(topology, shares(topology, parts))
    assert [environment_of(item, parts)["CUDA_VISIBLE_DEVICES"] for item in instances(alone)] == ["MIG-0", "MIG-1"]
    with pytest.raises(ConfigError, match="MIG parts of a GPU"):
        shares(load_topology("unified_local", ["dp_config.router.unified_schedulers.0.tp_size=2"]), parts)


def test_a_process_without_a_launcher_takes_the_first_gpus_that_it_sees() -> None:
    topology = two_nodes()
    second = find_instance(topology, Role.DECODE, 1)
    found = assign_devices(topology, [second], node(2))
    assert found.devices[second.key] == ("cuda:0", "cuda:1")
    others = set(itertools.chain(*(found.devices[item.key] for item in instances(topology) if item != second)))
    assert others == {"cuda:other"}, "on cards that it does not see"
