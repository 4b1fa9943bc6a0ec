"""`chitu join` where one of several routers is away."""

from __future__ import annotations

import contextlib
import socket

import msgspec
import pytest

from chitu.config.load import load_topology
from chitu.errors import ConfigError
from chitu.launch.join import own_address


def test_another_router_tells_the_own_address_if_the_first_is_away() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.2", 0))) as listening:
        port = listening.getsockname()[1]
        key = f"dp_config.router.pd_disaggregation.coordination_port={port}"
        router = load_topology("router_alone", [key]).dp_config.router
        hosts = ("127.0.0.3", "nowhere.invalid", "127.0.0.2")
        known = [msgspec.structs.replace(router, host=host) for host in hosts]
        assert own_address(known) in {"127.0.0.1", "127.0.0.2"}
        with pytest.raises(ConfigError, match=r"127\.0\.0\.3:"):
            own_address(known[:2])
