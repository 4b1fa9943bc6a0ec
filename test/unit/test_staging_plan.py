"""Which instances have staging memory, where and how much, and the error if it is too little."""

from __future__ import annotations

import pytest

from chitu.config.load import load_topology
from chitu.config.staging import StagingPlan, plan_staging
from chitu.config.topology import find_instance
from chitu.config.topology_checks import problems
from chitu.types import Role

PD = "dp_config.router.pd_disaggregation"
CARDS = [f"dp_config.router.{kind}_schedulers.0.devices=[cuda:0]" for kind in ("prefill", "decode")]
HOSTS = [
    f"dp_config.router.{key}=10.0.0.1" for key in ("host", "prefill_schedulers.0.host", "decode_schedulers.0.host")
]
MIB = 1 << 20


def plans(*overrides: str) -> tuple[StagingPlan | None, StagingPlan | None]:
    """Return the plans of P0 and D0 of a 1P1D."""
    topology = load_topology("pd_disagg_1p1d_local", list(overrides))
    of_p, of_d = (
        plan_staging(topology.dp_config.router, role, find_instance(topology, role, 0).config)
        for role in (Role.PREFILL, Role.DECODE)
    )
    return of_p, of_d


def places(*overrides: str) -> tuple[str, str]:
    of_p, of_d = plans(*overrides)
    return of_p.place if of_p else "none", of_d.place if of_d else "none"


def test_by_default_an_instance_with_its_pages_in_host_memory_has_none() -> None:
    for transport in ("auto", "shm", "mooncake", "nixl"):
        assert places(f"{PD}.transport={transport}") == ("none", "none")
    assert places(*HOSTS) == ("none", "none")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # One machine: cuda_ipc, or shm through D's host memory, into which P gathers by itself.
        ([], ("none", "host")),
        ([f"{PD}.transport=shm"], ("none", "host")),
        ([f"{PD}.transport=cuda_ipc"], ("none", "none")),
        ([f"{PD}.transport=cuda_ipc", f"{PD}.transfer=staged"], ("none", "pool")),
        ([f"{PD}.transfer=staged"], ("none", "pool")),
        ([f"{PD}.transport=shm", f"{PD}.transfer=staged"], ("none", "host")),
        # Mooncake over TCP sends from host memory anyway; RDMA and UCX read the GPU's.
        (HOSTS, ("host", "host")),
        ([f"{PD}.transport=mooncake"], ("host", "host")),
        ([f"{PD}.transport=mooncake", f"{PD}.mooncake_protocol=rdma"], ("pool", "pool")),
        ([*HOSTS, f"{PD}.mooncake_protocol=rdma"], ("pool", "pool")),
        ([f"{PD}.mooncake_protocol=rdma"], ("none", "host")),
        ([f"{PD}.transport=nixl"], ("pool", "pool")),
        ([f"{PD}.transport=nixl", f"{PD}.transfer=direct"], ("none", "none")),
    ],
)
def test_where_the_segments_of_gpus_are(overrides: list[str], expected: tuple[str, str]) -> None:
    assert places(*CARDS, *overrides) == expected


def test_staged_on_request_is_in_the_arena_of_a_pool_in_host_memory() -> None:
    assert places(f"{PD}.transfer=staged") == ("none", "pool"), "shm gathers by itself"
    of_p, of_d = plans(f"{PD}.transfer=staged", f"{PD}.transport=mooncake", f"{PD}.staging_mb=70")
    assert of_p == of_d == StagingPlan("pool", 16 * MIB, 4)
    assert of_d is not None and (of_d.nbytes, of_d.pool_bytes) == (64 * MIB, 64 * MIB)
    assert StagingPlan("host", MIB, 4).pool_bytes == 0


def test_several_ranks_are_never_staged() -> None:
    two = ["dp_config.router.decode_schedulers.0.tp_size=2", "dp_config.router.decode_schedulers.0.devices=[cpu,cpu]"]
    assert places(*two, f"{PD}.transfer=staged", f"{PD}.transport=mooncake") == ("pool", "none")
    no_p = [text.replace("decode", "prefill") for text in two]
    assert places(*no_p, f"{PD}.transfer=staged", f"{PD}.transport=mooncake") == ("none", "none")


def test_staged_on_request_with_several_ranks_is_a_sentence_and_auto_is_not() -> None:
    two = ["dp_config.router.decode_schedulers.0.tp_size=2", "dp_config.router.decode_schedulers.0.devices=[cpu,cpu]"]
    topology = load_topology("pd_disagg_1p1d_local", [*two, f"{PD}.transfer=staged"])
    (sentence,) = problems(topology, need_model=False)
    assert "transfer is staged, but a decode instance has tp_size 2" in sentence
    assert not list(problems(load_topology("pd_disagg_1p1d_local", [*two, f"{PD}.transfer=auto"]), need_model=False))


def test_too_few_segments_for_all_p_are_a_sentence_with_the_numbers() -> None:
    def found(*overrides: str) -> list[str]:
        topology = load_topology("pd_disagg_1p1d_local", list(overrides))
        return list(problems(topology, need_model=False))

    staged = [f"{PD}.transfer=staged", f"{PD}.staging_segment_mb=16"]
    assert found(*staged, f"{PD}.staging_mb=32") == []
    (sentence,) = found(*staged, f"{PD}.staging_mb=31")
    assert "1 segments of 16 MiB" in sentence and "each of 1 P needs 2" in sentence and "32 MiB" in sentence
    topology = load_topology("pd_disagg_2p2d_multi_node", [*staged, f"{PD}.staging_mb=48"])
    assert any("3 segments" in text and "each of 2 P" in text for text in problems(topology, need_model=False))
    assert found(f"{PD}.staging_mb=1") == [], "nobody needs it"
