"""How connections reach the API processes (`router.workers`): one process accepts, and hands each one on.

`ConnectionGate` is in the process that coordinates. It accepts and gives every connection to the API process that has
the fewest open ones, over a socket pair (SCM_RIGHTS). So clients with few long-lived connections are spread evenly; a
process that died or hangs gets none; while there is none at all, connections wait in the kernel's queue and none is
lost. `ConnectionIntake` is the other end. Both on their loop threads, and neither ever blocks.

With one listening socket for all (or SO_REUSEPORT) the kernel chooses: by chance, not by who has how many, and what it
queued for a process that just died is lost or waits for its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from chitu.http.server import HTTPServer, Listener

log = logging.getLogger(__name__)

CLOSED_PAUSE_S = 0.01
"""Closed connections are reported together, so long after the first of them."""


class Taker(Protocol):
    """An API process as the gate sees it."""

    num_open: int
    """Connections that it was given and has not reported as closed."""

    def give(self, connection: socket.socket) -> bool:
        """False where it cannot take it now; it keeps no reference then."""


def give(channel: socket.socket, connection: socket.socket) -> bool:
    """Send a connection through a (non-blocking) socket pair. False where the other side is gone or far behind."""
    try:
        socket.send_fds(channel, [b"c"], [connection.fileno()])
    except OSError as error:
        log.warning("an API process did not take a connection: %s", error)
        return False
    return True


class ConnectionGate:
    def __init__(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """`listener`: non-blocking, listening."""
        self._listener = Listener(loop, listener, self._place)
        self.port = self._listener.port
        self._takers: list[Taker] = []
        """The one that got the last connection is last."""
        self._unplaced: socket.socket | None = None
        """Accepted, and nobody took it: the first one for the next who can."""
        self._is_closed = False

    @property
    def has_unplaced(self) -> bool:
        """A connection waits for somebody who can take it."""
        return self._unplaced is not None

    def set_takers(self, takers: Sequence[Taker]) -> None:
        """Who gets connections from now on; accepts none while nobody does."""
        if set(takers) != set(self._takers):
            self._takers = list(takers)
        self.retry()

    def retry(self) -> None:
        """Go on after nobody could take one. Called from a timer."""
        if self._is_closed or not self._takers:
            self._listener.pause()
            return
        if self._unplaced is not None:
            self._place(self._unplaced)
        if self._unplaced is None:
            self._listener.resume()

    def close(self) -> None:
        """No new connections. What was handed on stays with who has it."""
        self._is_closed = True
        self._listener.close()
        if self._unplaced is not None:
            self._unplaced.close()

    def _place(self, connection: socket.socket) -> None:
        self._unplaced = None
        for taker in sorted(self._takers, key=lambda taker: taker.num_open):
            if taker.give(connection):
                connection.close()
                # Among equals the longest without one is next.
                self._takers.remove(taker)
                self._takers.append(taker)
                return
        self._unplaced = connection
        self._listener.pause()


class ConnectionIntake:
    """Serves what comes through `channel` (non-blocking) with `server`; `on_closed` hears how many have ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: socket.socket,
        server: HTTPServer,
        on_closed: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._server = server
        self._on_closed = on_closed
        self._num_closed = 0

    def start(self) -> None:
        self._loop.add_reader(self._channel.fileno(), self._take)

    def stop(self) -> None:
        """Serve what was sent before this call, and nothing after it."""
        self._take()
        with contextlib.suppress(OSError):
            self._loop.remove_reader(self._channel.fileno())
        self._channel.close()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                for descriptor in descriptors:
                    connection = socket.socket(fileno=descriptor)
                    connection.setblocking(False)
                    self._server.adopt(connection, self._note_closed)
                if not data:
                    # The coordinator is gone; the feed says so too, and ends this process.
                    self._loop.remove_reader(self._channel.fileno())
                    return

    def _note_closed(self) -> None:
        self._num_closed += 1
        if self._num_closed == 1:
            self._loop.call_later(CLOSED_PAUSE_S, self._report_closed)

    def _report_closed(self) -> None:
        count, self._num_closed = self._num_closed, 0
        self._on_closed(count)
