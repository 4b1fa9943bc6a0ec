"""TCP ports for tests whose configuration names them before a process listens there.

A port that the system picked (`bind` to 0) and that was closed again is free for any process, even for an outgoing
connection of another test. Those of `free_ports` are below the system's own range, in a block that this process holds
while it lives, by a socket on the block's first port. A process that may choose a port itself is given 0 instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 15_000
"""Range of the ports. Mooncake picks from 15000 on; our configurations begin at 21003, the system's range at 32768."""
BLOCK = 100


def free_ports(count: int) -> list[int]:
    """Return unused ports of 127.0.0.1 that this process was not given before and that no other test gets."""
    ports = list(itertools.islice(_ports(), count))
    assert len(ports) == count, f"no {count} ports are left between {FIRST} and {END}"
    return ports


@functools.cache
def _ports() -> Iterator[int]:
    return _of_own_blocks()


def _of_own_blocks() -> Iterator[int]:
    held = []
    for first in range(FIRST, END, BLOCK):
        with contextlib.suppress(OSError):  # the block belongs to another process
            held.append(socket.create_server(("127.0.0.1", first)))
            yield from filter(_is_free, range(first + 1, first + BLOCK))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
