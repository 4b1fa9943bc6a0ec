"""A network between P and D that is slow, silent or breaks connections while a write is in flight, and then recovers.

The wire towards D is so slow that a write takes minutes, so a write with a timeout of a second certainly does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from network import Network
from transport_peers import BETWEEN_HOSTS, Receiver, Trouble, Writer
from transport_process import break_connections, page_crcs

from chitu.kv_transfer.transports.transport import WriteError

pytestmark = [pytest.mark.parametrize("writer", BETWEEN_HOSTS, indirect=True, scope="module"), pytest.mark.transfer]
SLOW_BYTES_S = 5000
"""Bandwidth at which a socket's first buffer takes longer than the trouble lasts."""


@pytest.fixture
def network(writer: Writer) -> Iterator[Network]:
    """Yield the network, and heal it when the test has ended, even if it failed."""
    assert writer.way.network is not None
    yield writer.way.network
    writer.way.network.heal()


@pytest.mark.parametrize(
    "trouble", ["silent", *[pytest.param(each, marks=pytest.mark.by_hand) for each in ("slow", "broken")]]
)
def test_a_write_that_the_network_stopped_is_fenced_when_it_is_back_and_the_pair_goes_on(
    writer: Writer, network: Network, own_receiver: Receiver, trouble: str
) -> None:
    """No thread waits busily meanwhile."""
    if trouble == "broken" and writer.kind != "mooncake":
        pytest.skip("NIXL writes of broken connections are fenced by the peer's death alone")
    pages = writer.way.many_pages
    copies = writer.copies(own_receiver, pages, pages)
    peer = writer.connect(own_receiver)
    began = Trouble(writer)
    network.set("p0", "d0", rate_bytes_s=SLOW_BYTES_S, dropped=trouble == "silent")
    with pytest.raises(WriteError) as caught:
        writer.transport.write(peer, copies, 1.0)
    assert not caught.value.fenced
    if trouble == "broken":
        break_connections()
    for _ in range(10):
        assert not writer.transport.fence(peer, 0.02)
        threading.Event().wait(0.1)
    assert began.cpu_share < 0.5, "a thread is busy with waiting"
    network.heal()
    began.fence_after(peer)
    seen = own_receiver.all_crcs()
    writer.fill()
    assert own_receiver.all_crcs() == seen
    writer.transport.write(peer, writer.copies(own_receiver, [3], [8]), 10.0)
    assert own_receiver.crcs(2)[8] == page_crcs(writer.pool, 2)[3]
    writer.transport.disconnect(peer)
