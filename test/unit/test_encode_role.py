"""What the topology, the membership and the choice of instances make of E, which encode images for P."""

from __future__ import annotations

import msgspec
import pytest
from test_coordination import LAYOUT, World, info

from chitu.config.load import load_topology
from chitu.config.topology import computes_prompts, find_instance, instances
from chitu.config.topology_checks import missing_roles, problems
from chitu.errors import RoleRefused
from chitu.protocol import InstanceInfo, KVLayout
from chitu.protocol.weights import Weights, WeightsReport
from chitu.router.compatibility import why_incompatible
from chitu.router.weights import ClusterWeights
from chitu.types import Role, instance_name

FEATURES = KVLayout.uniform("hash", 1, 1, 64, 1, "float32", 4, regions_per_layer=1)


def encoder(rank: int = 0, incarnation: int = 9, layout: KVLayout = FEATURES) -> InstanceInfo:
    return info(Role.ENCODE, rank, incarnation, layout)


def topology_of(*overrides: str) -> list[str]:
    topology = load_topology("pd_disagg_1p1d_local", ["dp_config.router.encode_schedulers=[{port: 0}]", *overrides])
    return list(problems(topology, need_model=False))


def test_e_is_an_instance_of_the_topology_like_any_other() -> None:
    topology = load_topology("pd_disagg_1p1d_local", ["dp_config.router.encode_schedulers=[{port: 0}, {port: 0}]"])
    assert [each.name for each in instances(topology)] == ["P0", "D0", "E0", "E1"]
    found = find_instance(topology, Role.ENCODE, 1)
    assert found.key == "dp_config.router.encode_schedulers.1" and instance_name(*(found.role, 1)) == "E1"
    assert not computes_prompts(topology, Role.ENCODE) and missing_roles(topology) == ()
    assert not topology_of()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("dp_config.router.encode_schedulers.0.tp_size=2", "encode_schedulers.0.tp_size is 2, but an E is one process"),
        ("dp_config.router.encode_schedulers.0.dp_size=2", "encode_schedulers.0.dp_size is 2, but an E is one process"),
        ("model.images=off", "encode_schedulers.0 encodes images, which model.images turns off"),
    ],
)
def test_what_an_e_cannot_have_is_named(override: str, sentence: str) -> None:
    assert any(sentence in each for each in topology_of(override))


def test_e_joins_with_a_layout_of_features_and_serves_no_request() -> None:
    world = World()
    for each in (info(), info(Role.DECODE, 0, 2), encoder()):
        assert world.join(each).code == ""
    assert world.members == {(Role.PREFILL, 0, 1), (Role.DECODE, 0, 2), (Role.ENCODE, 0, 9)}
    world.core.require_others(Role.ENCODE, 0, "chitu drain E0")  # nothing depends on it
    assert world.beat(encoder())
    with pytest.raises(RoleRefused, match="E0 cannot become a prefill instance"):
        world.core.change_role(Role.ENCODE, 0, Role.PREFILL)
    with pytest.raises(RoleRefused, match="P0 cannot become a encode instance"):
        world.core.change_role(Role.PREFILL, 0, Role.ENCODE)


def test_e_needs_the_model_of_all_and_the_memory_and_a_transport_of_p() -> None:
    other = msgspec.structs.replace(FEATURES, model_hash="another")
    for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED, Role.ENCODE):
        assert "give both the same checkpoint" in why_incompatible(encoder(1, layout=other), info(role, 0, 3, LAYOUT))
        assert not why_incompatible(encoder(1), info(role, 0, 3, LAYOUT))
    on_gpu = msgspec.structs.replace(encoder(), device="cuda", ways=("cuda_ipc@a",))
    on_cpu = msgspec.structs.replace(info(), device="cpu", ways=("shm@a",))
    assert "P and E need the same kind of device" in why_incompatible(on_gpu, on_cpu)
    assert not why_incompatible(on_gpu, msgspec.structs.replace(on_cpu, role=Role.DECODE))
    far = msgspec.structs.replace(on_cpu, ways=("shm@b",))
    assert "no transport reaches" in why_incompatible(msgspec.structs.replace(encoder(), ways=("shm@a",)), far)


def test_a_change_of_weights_is_read_by_e_and_does_not_wait_until_e_has_changed() -> None:
    weights = ClusterWeights()
    weights.on_info(info())
    weights.on_info(encoder())
    change = weights.begin("/new", is_mixed=True)
    wanted = msgspec.structs.replace(change.wanted, model_hash="new")
    weights.on_report(info(), WeightsReport(prepared=wanted))
    assert change.phase == "prepare", "E has not read it"
    weights.on_report(encoder(), WeightsReport(prepared=wanted))
    assert change.phase == "commit"
    changed = msgspec.structs.replace(info(), weights=weights.serve)
    weights.on_info(changed)
    weights.on_report(changed, WeightsReport(serves=weights.serve))
    assert change.phase == "done" and weights.is_uniform and weights.missing() == ["E0"]
    late = msgspec.structs.replace(encoder(), weights=weights.serve)
    weights.on_info(late)
    assert not weights.missing()
    weights.on_lost(late)
    assert weights.serve != Weights()


@pytest.mark.parametrize("report", ["no such folder", "another hash"])
def test_an_e_that_cannot_read_the_weights_ends_the_change(report: str) -> None:
    weights = ClusterWeights()
    weights.on_info(info())
    weights.on_info(encoder())
    change = weights.begin("/new", is_mixed=True)
    wanted = msgspec.structs.replace(change.wanted, model_hash="new")
    weights.on_report(info(), WeightsReport(prepared=wanted))
    other = msgspec.structs.replace(wanted, model_hash=report)
    weights.on_report(encoder(), WeightsReport(prepared=other, error=report if "folder" in report else ""))
    assert change.phase == "failed" and change.error is not None and "E0" in change.error.message
    assert weights.serve == Weights()
