"""Addresses of machines by name. A name that is 127.0.1.1 on its own machine: `test/slurm`, whose nodes have it."""

from __future__ import annotations

import socket

import pytest

from chitu.errors import ConfigError
from chitu.launch.addresses import addresses_of, main, with_own_address


def test_addresses_stay_and_names_get_theirs() -> None:
    given = ["10.0.0.2", "fd00::1", "127.0.0.2"]
    assert addresses_of([*given, "localhost"]) == [*given, "127.0.0.1"]


def test_a_name_at_this_machine_alone_keeps_its_loopback_address() -> None:
    alias = "127.1"
    assert addresses_of([alias, "localhost"]) == ["127.0.0.1", "127.0.0.1"]


def test_only_its_own_name_has_to_have_an_address() -> None:
    absent = ["a..b", "router-0.absent.invalid"]
    assert with_own_address([absent[0], "localhost", absent[1]], 1) == [absent[0], "127.0.0.1", absent[1]]
    with pytest.raises(ConfigError, match=r"the name a\.\.b has no address here"):
        with_own_address([*absent, "localhost"], 0)


def test_a_pod_is_known_by_its_host_name_before_its_service_has_its_name() -> None:
    own = f"{socket.gethostname()}.absent.invalid"
    assert with_own_address(["10.0.0.1", own], 1) == addresses_of(["10.0.0.1", socket.gethostname()])


def test_a_name_without_an_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"the name a\.\.b has no address here"):
        addresses_of(["10.0.0.1", "a..b"])
    assert main(["a..b"]) == 2
    assert "chitu: the name a..b" in capsys.readouterr().err
