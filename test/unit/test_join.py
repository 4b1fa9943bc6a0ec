"""Which instance `chitu join` makes from the router's answer."""

from __future__ import annotations

import socket

import pytest

from chitu.config.load import load_topology
from chitu.config.schema import AUTO_DEVICES, InstanceConfig
from chitu.config.topology import instances
from chitu.config.topology_checks import problems
from chitu.errors import ConfigError
from chitu.launch.join import by_name, grown, next_rank
from chitu.net.curve import MAX_SOCKETS
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.types import Role

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
