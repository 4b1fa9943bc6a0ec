"""Meeting of the nodes of a `chitu doctor`: they send facts to the router's node, which has each node try all others'
ports.

Each node first listens on all its free ports, so that the ports tried are those that will be used. The meeting itself
is on the coordination port of the router's node. Messages are lines of JSON; an invalid or too long line ends its
connection. Blocking, one thread, every wait bounded.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from chitu.errors import ServiceError
from chitu.launch.node_facts import NodeFacts
from chitu.launch.preflight import Bind

MAX_LINE_BYTES = 1 << 20
TRY_S = 3.0
"""Timeout of a connection to one port of another node."""
RETRY_S = 0.2

Address = tuple[str, int]


class NotMet(ServiceError):
    """The router's node cannot be reached, or the connection broke."""

    code = "not_met"


class Hello(msgspec.Struct, frozen=True):
    facts: NodeFacts


class Targets(msgspec.Struct, frozen=True):
    """Addresses that a node is to try."""

    addresses: tuple[Address, ...]


class Tried(msgspec.Struct, frozen=True):
    unreachable: tuple[str, ...]
    now_s: float
    """Time of the node's wall clock."""


class Verdict(msgspec.Struct, frozen=True):
    code: int
    """Exit code of every node."""


_T = TypeVar("_T", bound=msgspec.Struct)


def hold(binds: Sequence[Bind]) -> dict[int, socket.socket]:
    """Return listening sockets at the free addresses, by port. The caller closes them at the end."""
    held = {}
    for bind in binds:
        if not bind.error and bind.port not in held:
            with contextlib.suppress(OSError):
                held[bind.port] = socket.create_server((bind.host, bind.port), reuse_port=False)
    return held


def try_all(addresses: Sequence[Address]) -> tuple[str, ...]:
    """Return `HOST:PORT: why` for each address that accepts no connection."""

    def why_not(address: Address) -> str:
        try:
            socket.create_connection(address, timeout=TRY_S).close()
        except OSError as error:
            return f"{address[0]}:{address[1]}: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(16) as pool:
        return tuple(filter(None, pool.map(why_not, addresses)))


class Lead:
    """The router's node in the meeting. Call `gather`, then `dismiss`."""

    def __init__(self, listener: socket.socket, wait_s: float) -> None:
        self._listener = listener
        self._wait_s = wait_s
        self._members: dict[str, socket.socket] = {}

    def gather(self, own: NodeFacts, ports: Mapping[str, Sequence[int]]) -> list[NodeFacts]:
        """Return the facts of all nodes that report within `wait_s`. `ports` has the ports to try, by host."""
        facts = {own.host: own}
        end_s = time.monotonic() + self._wait_s
        while len(facts) < len(ports) and (left_s := end_s - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            with contextlib.suppress(OSError, NotMet):
                member, _ = self._listener.accept()
                member.settimeout(TRY_S)
                hello = _receive(member, Hello).facts
                if hello.host in ports:
                    facts[hello.host], self._members[hello.host] = hello, member
        free = {host: {bind.port for bind in node.binds if not bind.error} for host, node in facts.items()}
        targets = {
            host: [(other, port) for other in facts if other != host for port in ports[other] if port in free[other]]
            for host in facts
        }
        for host, member in self._members.items():
            with contextlib.suppress(OSError):
                _send(member, Targets(tuple(targets[host])))
        facts[own.host] = msgspec.structs.replace(own, unreachable=try_all(targets[own.host]), clock_ahead_s=0.0)
        for host, member in self._members.items():
            member.settimeout(self._wait_s + TRY_S)
            with contextlib.suppress(OSError, NotMet):
                tried = _receive(member, Tried)
                facts[host] = msgspec.structs.replace(
                    facts[host], unreachable=tried.unreachable, clock_ahead_s=tried.now_s - time.time()
                )
        return [facts[host] for host in ports if host in facts]

    def dismiss(self, code: int) -> None:
        """Send all nodes this exit code and close their connections."""
        for member in self._members.values():
            with contextlib.suppress(OSError):
                _send(member, Verdict(code))
            member.close()


def follow(leader: Address, facts: NodeFacts, wait_s: float) -> int:
    """Run another node's part and return the common exit code. Raise NotMet."""
    end_s = time.monotonic() + wait_s
    while True:
        try:
            connection = socket.create_connection(leader, timeout=TRY_S)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise NotMet(
                    f"{facts.host} does not reach the router's node at {leader[0]}:{leader[1]}: "
                    f"{error.strerror or error} (is `chitu doctor` running there, is there a firewall?)"
                ) from error
            time.sleep(RETRY_S)
    with connection:
        connection.settimeout(2 * wait_s + TRY_S)
        try:
            _send(connection, Hello(facts))
            unreachable = try_all(_receive(connection, Targets).addresses)
            _send(connection, Tried(unreachable, time.time()))
            return _receive(connection, Verdict).code
        except OSError as error:
            raise NotMet(f"the connection to the router's node at {leader[0]}:{leader[1]} broke: {error}") from error


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(msgspec.json.encode(message) + b"\n")


def _receive(connection: socket.socket, kind: type[_T]) -> _T:
    """Return the next message. Raise NotMet for a line that is no such message."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        line += data
        if not data or len(line) > MAX_LINE_BYTES:
            raise NotMet("the other side closed the connection, or sent too long a line")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise NotMet(f"the other side sent a line that is no message of `chitu doctor`: {error}") from error
