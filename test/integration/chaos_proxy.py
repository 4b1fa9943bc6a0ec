"""TCP proxies of every ZMQ and bootstrap port of a cluster, to cut the wires between its processes.

Each process publishes another loopback address than the one it listens at (all of 127.0.0.0/8 is this machine), and at
that address, with the same port number, a proxy listens. Ports that are picked at start come from the cluster view,
which the router publishes. Both ends of a connection together identify the client (two connections of different
processes to different ports may have the same local port), so a cut can isolate exactly one process: its connections
break, and new ones are accepted and dropped, until it is healed. A frozen process keeps its connections, but nothing
passes. Instead of a process, `router>D0` names the connections from one process to the other. Needs no root.

One thread with an asyncio loop; any thread may call `cut`, `freeze` and `heal`. Clients talk to the router directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import zmq
import zmq.asyncio

from chitu.net.curve import ClusterSecrets
from chitu.net.view_feed import ViewReceiver, ask_for_whole
from chitu.protocol import view_codec
from chitu.types import instance_name

REAL_HOST = "127.0.0.1"
ROUTER = "router"
FROZEN_POLL_S = 0.02
FIND_TRIES = 5
"""Number of looks at /proc for the client of a new connection while a process is cut off."""
END_S = 2.0
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ALL_STATES = 0xFFFFFFFF
ANY_SOCKET = bytes(4) + b"\xff" * 8
"""Matches any interface, without a cookie."""


class Connection(NamedTuple):
    """Addresses of the client's end and of the other end."""

    client_host: str
    client_port: int
    host: str
    port: int


@dataclass(eq=False)
class Wire:
    """One proxied connection."""

    listener: str
    """Name of the process that accepted the connection."""
    connection: Connection
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter] | None = None
    client: str | None = None
    """Name of the process that connected; None until it is looked up."""

    @property
    def ends(self) -> tuple[str, str | None, str]:
        """Return the names by which this wire is cut or frozen."""
        return self.listener, self.client, f"{self.client}>{self.listener}"

    def break_off(self) -> None:
        for writer in self.writers or ():
            writer.transport.abort()


class Wires:
    """Proxies of all wires. `addresses`: where each process appears to be. `pids`: the live processes, by name."""

    def __init__(self, addresses: Mapping[str, str], pids: Callable[[], Mapping[str, int]]) -> None:
        self._addresses = addresses
        self._pids = pids
        self._cut: set[str] = set()
        self._frozen: set[str] = set()
        self._wires: set[Wire] = set()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._watching: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def open(self, router_ports: Iterable[int], view_port: int, secrets: ClusterSecrets) -> None:
        """Proxy the router's ports, and from now on those of every instance that the router lists."""

        async def begin() -> None:
            for port in router_ports:
                await self._listen(ROUTER, port)
            self._watching = asyncio.create_task(self._watch(view_port, secrets))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result()

    def cut(self, name: str) -> None:
        """Break every connection of a process, and drop each new one until `heal`."""

        async def cut() -> None:
            self._cut.add(name)
            self._find_clients()
            for wire in [wire for wire in self._wires if name in wire.ends or wire.client is None]:
                wire.break_off()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result()

    def freeze(self, name: str) -> None:
        """Let nothing pass on the connections of a process from now on; both ends still send. What was sent meanwhile
        is lost with the next `cut`."""

        async def freeze() -> None:
            self._find_clients()
            self._frozen.add(name)

        asyncio.run_coroutine_threadsafe(freeze(), self._loop).result()

    def heal(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._cut.discard, name)
        self._loop.call_soon_threadsafe(self._frozen.discard, name)

    def connections_of(self, name: str) -> int:
        async def count() -> int:
            self._find_clients()
            return sum(name in wire.ends for wire in self._wires)

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result()

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers.values():
                server.close()
            self._cut.update(self._addresses)
            for wire in self._wires:
                wire.break_off()
            if self._watching is not None:
                self._watching.cancel()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            _, left = await asyncio.wait(tasks, timeout=END_S) if tasks else ((), ())
            for task in left:
                task.cancel()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------------------------------------------ the loop

    async def _watch(self, view_port: int, secrets: ClusterSecrets) -> None:
        """Follow the router's view, which bypasses the proxies, to learn where proxies are needed."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            feed = ViewReceiver(time.monotonic())
            for topic in feed.topics:
                socket.setsockopt(zmq.SUBSCRIBE, topic)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, secrets.curve_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secrets.curve_secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, secrets.curve_public)
            socket.connect(f"tcp://{REAL_HOST}:{view_port}")
            while True:
                feed.take(view_codec.decode((await socket.recv_multipart())[-1]))
                if feed.should_ask(time.monotonic()):
                    ask_for_whole(socket, feed.topic)
                for info in feed.view.instances:
                    name = instance_name(info.role, info.engine_rank)
                    for port in (info.port, info.control_port):
                        await self._listen(name, port)

    async def _listen(self, name: str, port: int) -> None:
        where = self._addresses[name], port
        if where not in self._servers:

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError):
                    await self._connect(name, port, reader, writer)

            self._servers[where] = await asyncio.start_server(accept, *where)

    async def _connect(self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(*writer.get_extra_info("peername"), *writer.get_extra_info("sockname"))
        wire = Wire(name, connection)
        self._wires.add(wire)
        try:
            for _ in range(FIND_TRIES if self._cut and name not in self._cut else 0):
                self._find_clients()
                if wire.client is not None:
                    break
                await asyncio.sleep(FROZEN_POLL_S)
            if self._cut.intersection(wire.ends) or (self._cut and wire.client is None and name not in self._cut):
                return  # if its client is unknown, the connection is dropped and will be retried
            there = await asyncio.open_connection(REAL_HOST, port)
            wire.writers = writer, there[1]
            if not self._cut.intersection(wire.ends):
                await asyncio.gather(self._copy(wire, reader, there[1]), self._copy(wire, there[0], writer))
        finally:
            self._wires.discard(wire)
            wire.break_off()
            writer.transport.abort()

    async def _copy(self, wire: Wire, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Copy until one side ends; the error then ends the other direction with it."""
        while data := await source.read(1 << 16):
            while self._frozen.intersection(wire.ends):
                await asyncio.sleep(FROZEN_POLL_S)
            target.write(data)
            await target.drain()
        raise ConnectionResetError

    def _find_clients(self) -> None:
        """Look up unknown clients. Called only for cuts and freezes, because it walks through /proc."""
        unknown = [wire for wire in self._wires if wire.client is None]
        if unknown:
            owners = owners_of({wire.connection for wire in unknown}, self._pids())
            for wire in unknown:  # a client that is not found is looked up again: its process may just be connecting
                wire.client = owners.get(wire.connection)


def owners_of(connections: Iterable[Connection], pids: Mapping[str, int]) -> dict[Connection, str]:
    """Return which of these processes owns the client's end of which of these connections."""
    inodes = {f"socket:[{inode}]": connection for connection in connections if (inode := inode_of(connection))}
    owners = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    connection = inodes.get(os.readlink(fd.path))
                    if connection is not None:
                        owners[connection] = name
    return owners


def inode_of(connection: Connection) -> int:
    """Return the inode of the client's end, by sock_diag(7); 0 if none. /proc/net/tcp is slow with thousands of closed
    ones."""
    ports = struct.pack("!HH", connection.client_port, connection.port)
    hosts = struct.pack("4s12x4s12x", *(socket.inet_aton(host) for host in (connection.client_host, connection.host)))
    wanted = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, ALL_STATES) + ports + hosts + ANY_SOCKET
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diag:
        diag.send(struct.pack("=IHHII", 16 + len(wanted), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + wanted)
        answer = diag.recv(1 << 12)
    kind: int = struct.unpack_from("=H", answer, 4)[0]
    return struct.unpack_from("=I", answer, 84)[0] if kind == SOCK_DIAG_BY_FAMILY else 0
