"""TCP ports for tests whose configuration names them before a process listens there.

A port that the system picked and that was closed again (`bind` to 0) is free for everybody, be it for the next outgoing
connection of another test. Those of `free_ports` are below the system's own range, in a block that this process holds
as long as it lives, by a socket on the block's first port. A process that may choose for itself is given 0 instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
from collections.abc import Iterator

FIRST, END = 10_000, 15_000
"""Mooncake picks from 15000 on; what our configurations name begins at 21003, and the system's range at 32768."""
BLOCK = 100


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 on which nobody listens, which this process was not given before and no other test gets."""
    ports = list(itertools.islice(_ports(), count))
    assert len(ports) == count, f"no {count} ports are left between {FIRST} and {END}"
    return ports


@functools.cache
def _ports() -> Iterator[int]:
    return _of_own_blocks()


def _of_own_blocks() -> Iterator[int]:
    held = []
    for first in range(FIRST, END, BLOCK):
        with contextlib.suppress(OSError):  # it is another process's block
            held.append(socket.create_server(("127.0.0.1", first)))
            yield from filter(_is_free, range(first + 1, first + BLOCK))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
