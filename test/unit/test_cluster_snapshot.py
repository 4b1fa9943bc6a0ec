"""The transports that move KV, as the page and `chitu chat` show them."""

from __future__ import annotations

import pytest

from chitu.config.load import load_topology
from chitu.http.cluster_snapshot import transport_in_use
from chitu.protocol import ClusterView, InstanceInfo, KVLayout
from chitu.types import Role

LAYOUT = KVLayout("m", num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32", vocab_size=100)


def view(**hosts: str) -> ClusterView:
    """Return a view of instances, given as P0="10.0.0.1", ..."""
    roles = {role.letter: role for role in Role}
    infos = [
        InstanceInfo(roles[name[0]], int(name[1:]), 1 + index, host, 1, 2, LAYOUT, 512)
        for index, (name, host) in enumerate(hosts.items())
    ]
    return ClusterView(1, 1, tuple(infos))


@pytest.mark.parametrize(
    ("overrides", "members", "expected"),
    [
        ([], {"P0": "127.0.0.1", "D0": "localhost"}, "shm"),
        ([], {"P0": "10.0.0.1", "D0": "10.0.0.2"}, "mooncake"),
        ([], {"P0": "10.0.0.1", "D0": "10.0.0.1", "D1": "10.0.0.2"}, "shm and mooncake"),
        ([], {"P0": "10.0.0.1"}, "auto"),
        (["transport=nixl"], {"P0": "127.0.0.1", "D0": "127.0.0.1"}, "nixl"),
        (["prefill_schedulers.0.devices=['cuda:0']"], {"P0": "127.0.0.1", "D0": "127.0.0.1"}, "cuda_ipc"),
    ],
)
def test_auto_is_shown_as_what_it_comes_to(overrides: list[str], members: dict[str, str], expected: str) -> None:
    prefixes = {"transport": "dp_config.router.pd_disaggregation."}
    words = [f"{prefixes.get(word.split('=')[0], 'dp_config.router.')}{word}" for word in overrides]
    assert transport_in_use(load_topology(None, words), view(**members)) == expected
