"""Peers that die, freeze and end, on one host and between hosts that are 2 ms and 40 ms apart."""

from __future__ import annotations

import signal
import threading
from typing import Any

import msgspec
import pytest
from transport_peers import BETWEEN_HOSTS, NUM_REGIONS, ON_ONE_HOST, Process, Receiver, Trouble, Writer
from transport_process import break_connections, page_crcs, region

from chitu.errors import TransferFailed
from chitu.kv_transfer.transports.nixl import TRUSTED_S
from chitu.kv_transfer.transports.transport import WriteError

pytestmark = pytest.mark.transfer

WAYS = [*ON_ONE_HOST, *BETWEEN_HOSTS]


def over(*kinds: str) -> pytest.MarkDecorator:
    """Run a test over the ways of these kinds."""
    return pytest.mark.parametrize("writer", ways_of(*kinds), indirect=True, scope="module")


def ways_of(*kinds: str) -> list[Any]:
    return [each for each in WAYS if each.values[0].kind in kinds]


ALL = ("shm", "mooncake", "nixl", "cuda_ipc", "cuda_ipc_gpu")
CONNECTED = ("mooncake", "nixl")
"""Those that have a connection, and whose peer has to run for a write."""


@over(*ALL)
def test_kill_9_of_the_peer_ends_the_write_and_a_fresh_peer_is_served(writer: Writer, own_receiver: Receiver) -> None:
    peer, pages = writer.connect(own_receiver), writer.way.many_pages
    copies = writer.copies(own_receiver, pages, pages)
    is_writing = threading.Event()
    errors: list[WriteError] = []

    def run() -> None:
        try:
            while True:
                writer.transport.write(peer, copies, 30.0)
                is_writing.set()
        except WriteError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_writing.wait(30)
    own_receiver.kill()
    thread.join(40)
    assert len(errors) == 1 and "in time" not in errors[0].message
    assert writer.transport.fence(peer, 5.0)
    with pytest.raises(TransferFailed):
        writer.connect(own_receiver)
    writer.transport.disconnect(peer)

    fresh = writer.receiver()
    new_peer = writer.connect(fresh)
    writer.transport.write(new_peer, writer.copies(fresh, [9], [4]), 10.0)
    assert fresh.crcs(3)[4] == page_crcs(writer.pool, 3)[9]
    writer.transport.disconnect(new_peer)
    assert fresh.end() == 0


@over(*CONNECTED)
@pytest.mark.parametrize("who", ["writer", pytest.param("receiver", marks=pytest.mark.by_hand)])
def test_a_pair_whose_connection_broke_while_it_was_idle_goes_on_by_itself(
    writer: Writer, own_receiver: Receiver, who: str
) -> None:
    peer, copies = writer.connect(own_receiver), writer.copies(own_receiver, [5], [6])
    writer.transport.write(peer, copies, 10.0)
    writer.fill()
    if who == "writer":
        break_connections()
    else:
        own_receiver.ask("break")
    began = Trouble(writer)
    if writer.kind == "nixl":  # NIXL probes a connection that was idle
        threading.Event().wait(TRUSTED_S)
    while own_receiver.crcs(4)[6] != page_crcs(writer.pool, 4)[5]:
        try:
            writer.transport.write(peer, copies, 10.0)
        except WriteError:
            began.fence_after(peer)
    writer.transport.disconnect(peer)


@pytest.mark.parametrize(
    ("writer", "breaks"),
    [
        *[pytest.param(*way.values, False, id=f"connected-{way.id}", marks=way.marks) for way in ways_of(*CONNECTED)],
        # NIXL's writes of broken connections are fenced by the peer's death alone.
        *[pytest.param(*way.values, True, id=f"broken-{way.id}", marks=way.marks) for way in ways_of("mooncake")],
    ],
    indirect=["writer"],
    scope="module",
)
def test_a_frozen_peer_is_fenced_only_after_it_ran_on_and_then_nothing_lands(
    writer: Writer, own_receiver: Receiver, breaks: bool
) -> None:
    """With `breaks`, our end of the connection ends meanwhile; the peer's kernel has bytes that its process has not
    read."""
    pool, pages = writer.pool, writer.way.many_pages
    copies = writer.copies(own_receiver, pages, pages)
    peer = writer.connect(own_receiver)
    trouble = Trouble(writer)
    own_receiver.process.send_signal(signal.SIGSTOP)
    with pytest.raises(WriteError) as caught:
        writer.transport.write(peer, copies, 1.0)
    assert not caught.value.fenced
    if breaks:
        break_connections()
    assert not writer.transport.fence(peer, 0.5)
    assert trouble.cpu_share < 0.5, "a thread is busy with waiting"
    own_receiver.process.send_signal(signal.SIGCONT)
    trouble.fence_after(peer)
    for index in range(NUM_REGIONS):  # at once: a write that starts from here on would carry this value
        region(pool, index).fill_(7.0)
    late = page_crcs(pool, 0)[0]
    seen = own_receiver.all_crcs()
    assert not any(late in crcs for crcs in seen)
    for _ in range(2):
        assert own_receiver.all_crcs() == seen
    writer.fill()
    writer.transport.write(peer, writer.copies(own_receiver, [0], [0]), 10.0)
    assert own_receiver.crcs(0)[0] == page_crcs(pool, 0)[0]
    writer.transport.disconnect(peer)


@over(*ALL)
def test_a_process_with_a_transfer_thread_exits_with_code_0(writer: Writer, own_receiver: Receiver) -> None:
    way = writer.way
    sender = Process(way, "p0", "send", way.kind, way.address("p0"), len(way.many_pages))
    sender.tell(msgspec.msgpack.encode(own_receiver.memory).hex())
    assert sender.answer() == "sent"
    assert sender.wait() == 0
    assert own_receiver.end() == 0
