"""Which instances the router refuses to combine, and the error that it gives."""

from __future__ import annotations

import msgspec
import pytest

from chitu.protocol import InstanceInfo, KVLayout
from chitu.router.compatibility import MemberKinds, why_incompatible
from chitu.types import Role

LAYOUT = KVLayout("hash", 2, 2, 16, 16, "float32", 100)
SHM = "shm@boot:pid:[1]:0"
RDMA, TCP = "mooncake over rdma", "mooncake over tcp"


def info(
    role: Role, host: str, ways: tuple[str, ...] = (), device: str = "cpu", dtype: str = "float32"
) -> InstanceInfo:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    return InstanceInfo(role, 0, 1, host, 1, 2, layout, 512, device=device, ways=ways)


def prefill(*ways: str, **more: str) -> InstanceInfo:
    return info(Role.PREFILL, "10.0.0.1", ways, **more)


def decode(*ways: str, **more: str) -> InstanceInfo:
    return info(Role.DECODE, "10.0.0.2", ways, **more)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((SHM, TCP), (f"{SHM}-elsewhere", TCP)), ((SHM,), (SHM,)), (("nixl",), ("nixl",)), ((), (TCP,))],
)
def test_one_way_in_common_is_enough(mine: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    assert why_incompatible(decode(*mine), prefill(*theirs)) == ""


def test_rdma_on_one_node_alone_is_named_with_both_sides_and_the_cure() -> None:
    assert why_incompatible(decode(SHM, TCP), prefill(f"{SHM}-elsewhere", RDMA)) == (
        "D0 on 10.0.0.2 does not fit P0 on 10.0.0.1: no transport reaches from one to the other. D0 has shm, mooncake "
        "over tcp; P0 has shm, mooncake over rdma: set dp_config.router.pd_disaggregation.mooncake_protocol=tcp on all "
        "nodes, or mend RDMA where it is missing (`chitu doctor`)"
    )


def test_a_node_without_the_library_and_two_containers_have_their_own_cures() -> None:
    assert "install Mooncake on 10.0.0.2, too" in why_incompatible(decode(SHM), prefill(f"{SHM}-elsewhere", TCP))
    assert "transport=mooncake" in why_incompatible(decode(SHM), prefill(f"{SHM}-elsewhere"))


def test_two_p_write_to_each_other_never() -> None:
    other = msgspec.structs.replace(prefill(TCP), engine_rank=1)
    assert why_incompatible(prefill(RDMA), other) == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_node_without_gpus_is_named_as_that_whatever_the_dtypes_are(dtype: str) -> None:
    said = why_incompatible(decode(TCP, dtype=dtype), prefill(TCP, device="cuda", dtype="bfloat16"))
    assert "D0 has its pages in host memory, P0 in GPU memory" in said and "dtype" not in said
    assert "10.0.0.1" in said and "10.0.0.2" in said


def test_a_unified_instance_needs_the_model_alone() -> None:
    unified = info(Role.UNIFIED, "10.0.0.3", device="cuda", dtype="bfloat16")
    assert why_incompatible(unified, prefill(TCP)) == ""
    alien = msgspec.structs.replace(unified, layout=msgspec.structs.replace(LAYOUT, model_hash="another"))
    assert "give both the same checkpoint" in why_incompatible(alien, prefill(TCP))


def test_a_new_instance_is_compared_with_every_kind_and_in_doubt_with_every_member() -> None:
    """Members of one kind may still differ in the ways that do not leave their machines."""
    kinds = MemberKinds()
    for rank in range(4):
        here = f"{SHM}-{rank % 2}"
        kinds.add(msgspec.structs.replace(prefill(here, TCP), engine_rank=rank))
    assert kinds.why_incompatible(decode(TCP)) == ""
    assert kinds.why_incompatible(decode()) == "", "it does not say which ways it has"
    said = kinds.why_incompatible(decode(f"{SHM}-0", RDMA))
    assert "P1" in said and "no transport" in said, "P0 and P2 share memory with it, P1 does not"
    assert "P0" in kinds.why_incompatible(decode(f"{SHM}-5"))
    for rank in (1, 3):
        kinds.remove(msgspec.structs.replace(prefill(f"{SHM}-1", TCP), engine_rank=rank))
    assert kinds.why_incompatible(decode(f"{SHM}-0", RDMA)) == ""


def test_an_instance_need_not_fit_the_one_whose_place_it_takes() -> None:
    kinds = MemberKinds()
    kinds.add(prefill(SHM, dtype="float32"))
    assert kinds.why_incompatible(prefill(SHM, dtype="bfloat16")) == ""
    kinds.add(msgspec.structs.replace(prefill(SHM, dtype="float32"), engine_rank=1))
    assert "P1" in kinds.why_incompatible(prefill(SHM, dtype="bfloat16"))
