"""A bit flips in the length of a frame on its way: the connection is closed, and messages arrive over the next one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import zmq

from chitu.net import sockets
from chitu.net.curve import make_context

LONG_FRAME = 2
"""Flags of a frame whose length has 8 bytes."""
SOUND, BROKEN = (struct.pack(">BQ", LONG_FRAME, length) for length in (1000, 1000 | 1 << 23))


def relay(source: socket.socket, target: socket.socket, flips: list[bytes]) -> None:
    """Pass bytes on. The first one of `flips` that passes becomes BROKEN."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if flips and flips[0] in data:
                data = data.replace(flips.pop(), BROKEN)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def accept(listener: socket.socket, port: int, flips: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=relay, args=(near, far, []), daemon=True).start()
            threading.Thread(target=relay, args=(far, near, flips), daemon=True).start()


def test_a_receiver_that_waits_for_a_phantom_gets_the_next_messages() -> None:
    context, flips = make_context(None), [SOUND]
    sender, port = sockets.bind(context, zmq.PUSH, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener, port, flips), daemon=True).start()
        receiver = sockets.connect(context, zmq.PULL, "127.0.0.1", listener.getsockname()[1])
        assert receiver.getsockopt(zmq.HEARTBEAT_TIMEOUT) == sender.getsockopt(zmq.HEARTBEAT_TIMEOUT) == sockets.DEAF_MS
        # The same, but sooner.
        address = receiver.getsockopt_string(zmq.LAST_ENDPOINT)
        receiver.disconnect(address)
        receiver.setsockopt(zmq.HEARTBEAT_IVL, 100)
        receiver.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
        receiver.connect(address)
        while not receiver.poll(100):
            sender.send(bytes(10))
        sender.send(bytes(1000))
        while len(receiver.recv()) != 30:
            while not receiver.poll(100):
                sender.send(bytes(30))
        assert flips == []
    context.destroy(linger=0)
