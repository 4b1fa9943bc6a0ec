"""Hosts made of network namespaces; a forwarder in user space delays, loses, slows or silently drops their packets.

A TCP proxy cannot do this: here the kernels at both ends have real connections, so silence is silence (no reset, no
acknowledgement), and a delay holds for every library, Mooncake and UCX too. A host has its own loopback and one
TUN device, `DEVICE`; it shares files, shared memory and pids with the test. The forwarder is a separate process that
holds the other ends of the TUN devices. Nothing is added to the test's own namespace, so no packet can leave.

    with Network(["router", "p0", "d0"]) as net:
        process = net.popen("p0", [sys.executable, "-m", ...])     # binds net.address("p0")
        net.set("p0", "d0", delay_s=0.001)                         # 2 ms of round trip
        with net.inside("router"):                                 # sockets made here belong to that host
            client = socket.create_connection((net.address("p0"), 80))
        net.drop("router", "p0")                                   # both ways; one_way=True: only towards p0
        net.heal()

Needs root and /dev/net/tun: `require_network()` skips a test if they are missing, and fails it if CI=true.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from chitu.process.descendants import die_with_parent

SUBNET, SUBNET_6 = "10.77.0", "fd77::"
MTU = 1500
DEVICE = min(set(os.listdir("/sys/class/net")) - {"lo", "bonding_masters"}, default="net0")
"""Name of a host's TUN device. UCX looks it up in /sys, which shows the devices of the namespace that mounted /sys."""
QUEUE_PACKETS = 10_000
MAX_BACKLOG_S = 2.0
"""Longest queue of a slow wire; it drops a packet that would wait longer, as a full router buffer does."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> list[str]:
    """Return what is missing for making such hosts here; empty if nothing is."""
    if os.geteuid() != 0:
        return ["root"]
    absent = [f"{tool} (package {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        absent.append("/dev/net/tun")
    if not absent:
        probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
        if probe.returncode:
            absent.append(f"the right to make network namespaces ({probe.stderr.strip()})")
    return absent


TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}


def require_network() -> None:
    if absent := missing():
        text = f"no network namespaces here, missing: {', '.join(absent)}"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)


@dataclass(slots=True)
class Wire:
    """What happens to packets in one direction between two hosts."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of packets that are lost, 0 to 1."""
    rate_bytes_s: float = 0.0
    """Bytes a second; 0: as fast as the forwarder."""
    dropped: bool = False
    """Whether every packet is dropped."""


class Network:
    """Hosts and the wires between them. Use it in the main thread: its processes end with the thread that made them."""

    def __init__(self, names: Sequence[str], delay_s: float = 0.0) -> None:
        """Make the network. `delay_s` is the one-way delay of every wire."""
        require_network()
        self._index = {name: index for index, name in enumerate(names)}
        self._wires = {(a, b): Wire(delay_s=delay_s) for a, b in itertools.permutations(range(len(names)), 2)}
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._forwarder: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Network:
        try:
            devices = [self._boot(name) for name in self._index]
            self._forwarder = subprocess.Popen(
                [sys.executable, __file__, *map(str, devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=devices,
                preexec_fn=_die_with(os.getpid()),
            )
            for device in devices:
                os.close(device)
            self._send(self._wires)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self._processes, self._forwarder, *self._keepers):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if self._forwarder is not None and self._forwarder.stdin is not None and self._forwarder.stdout is not None:
            self._forwarder.stdout.close()
            with contextlib.suppress(OSError):
                self._forwarder.stdin.close()

    # --------------------------------------------------------------------------------------------------------- hosts

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self._index[name] + 1}"

    def address_6(self, name: str) -> str:
        """Return the host's IPv6 address."""
        return f"{SUBNET_6}{self._index[name] + 1:x}"

    def namespace(self, name: str) -> str:
        """Return the path of a host's network namespace."""
        return f"/proc/{self._keepers[self._index[name]].pid}/ns/net"

    def argv(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, under the pid that it is started with."""
        return ["nsenter", f"--net={self.namespace(name)}", *command]

    def popen(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a `subprocess.Popen` on a host; it is killed with the network if it has not ended before."""
        process = subprocess.Popen(self.argv(name, command), preexec_fn=_die_with(os.getpid()), **options)
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Put this thread on a host: sockets that it makes meanwhile stay that host's for as long as they live."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.namespace(name))
            try:
                yield
            finally:
                _set_namespace(own)
        finally:
            os.close(own)

    # --------------------------------------------------------------------------------------------------------- wires

    def set(self, a: str, b: str, *, one_way: bool = False, **changes: Any) -> None:
        """Change fields of `Wire` between two hosts; `one_way`: only for packets from a to b."""
        ways = [(self._index[a], self._index[b])]
        if not one_way:
            ways.append((ways[0][1], ways[0][0]))
        for way in ways:
            for key, value in changes.items():
                setattr(self._wires[way], key, value)
        self._send({way: self._wires[way] for way in ways})

    def drop(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Drop every packet between two hosts, without a sign, until `heal`."""
        self.set(a, b, one_way=one_way, dropped=True)

    def isolate(self, name: str) -> None:
        """Drop every packet between a host and all the rest."""
        for other in self._index:
            if other != name:
                self.drop(name, other)

    def heal(self) -> None:
        """Reset every wire to no loss and full speed; delays stay."""
        for way, wire in self._wires.items():
            self._wires[way] = Wire(delay_s=wire.delay_s)
        self._send(self._wires)

    # ------------------------------------------------------------------------------------------------------ internal

    def _boot(self, name: str) -> int:
        """Make the host and return the forwarder's end of its device."""
        keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=_die_with(os.getpid()),
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        with keeper.stdout as output:
            assert output.readline() == b"up\n", f"host {name} did not come up"
        with self.inside(name):
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        for command in (
            f"addr add {self.address(name)}/24 dev {DEVICE}",
            f"link set {DEVICE} mtu {MTU} txqueuelen {QUEUE_PACKETS} up",
            f"-6 addr add {self.address_6(name)}/64 dev {DEVICE} nodad",
        ):
            done = subprocess.run(self.argv(name, ["ip", *command.split()]), capture_output=True, text=True)
            assert done.returncode == 0, f"ip {command} on {name}: {done.stderr}"
        return device

    def _send(self, wires: Mapping[tuple[int, int], Wire]) -> None:
        """Change the wires. Returns once they have changed: every packet sent after that is affected."""
        assert self._forwarder is not None and self._forwarder.stdin is not None and self._forwarder.stdout is not None
        rows = [(a, b, asdict(wire)) for (a, b), wire in wires.items()]
        self._forwarder.stdin.write(json.dumps(rows).encode() + b"\n")
        self._forwarder.stdin.flush()
        assert self._forwarder.stdout.read(1) == b".", "the forwarder has ended"


def _die_with(parent: int) -> Any:
    return lambda: die_with_parent(parent)


def _enter(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


# ------------------------------------------------------------------------------------------------------- the forwarder


@dataclass(slots=True)
class _Way:
    wire: Wire = field(default_factory=Wire)
    free_at_s: float = 0.0
    """Time at which the last packet has left a wire with a rate."""


_NETWORKS = (socket.inet_aton(f"{SUBNET}.0")[:-1], socket.inet_pton(socket.AF_INET6, SUBNET_6)[:-1])


class _Forwarder:
    """The process that forwards packets. It has one thread and ends with its standard input."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices
        self._ways = {way: _Way() for way in itertools.permutations(range(len(devices)), 2)}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._number = itertools.count()
        self._random = random.Random(0)

    def run(self) -> None:
        commands = b""
        index_of = {device: index for index, device in enumerate(self._devices)}
        for device in self._devices:
            os.set_blocking(device, False)
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for ready in select.select([0, *self._devices], [], [], wait_s)[0]:
                if ready:
                    self._drain(index_of[ready])
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    for a, b, wire in json.loads(line):
                        self._ways[a, b].wire = Wire(**wire)
                    os.write(1, b".")
            now_s = time.monotonic()
            while self._late and self._late[0][0] <= now_s:
                _, _, to, packet = heapq.heappop(self._late)
                self._write(to, packet)

    def _drain(self, source: int) -> None:
        for _ in range(64):  # then other devices get a turn
            try:
                packet = os.read(self._devices[source], MTU + 100)
            except BlockingIOError:
                return
            self._forward(source, packet)

    def _forward(self, source: int, packet: bytes) -> None:
        target = packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]
        if target[:-1] not in _NETWORKS:
            return  # neighbour discovery of IPv6, or multicast
        to = target[-1] - 1
        way = self._ways.get((source, to))
        if way is None or way.wire.dropped or (way.wire.loss and self._random.random() < way.wire.loss):
            return
        wire = way.wire
        if not wire.delay_s and not wire.rate_bytes_s:
            self._write(to, packet)
            return
        now_s = time.monotonic()
        due_s = now_s
        if wire.rate_bytes_s:
            way.free_at_s = max(way.free_at_s, now_s)
            if way.free_at_s - now_s > MAX_BACKLOG_S:
                return
            way.free_at_s += len(packet) / wire.rate_bytes_s
            due_s = way.free_at_s
        heapq.heappush(self._late, (due_s + wire.delay_s, next(self._number), to, packet))

    def _write(self, to: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue drops it, as a wire does
            os.write(self._devices[to], packet)


if __name__ == "__main__":
    _Forwarder([int(device) for device in sys.argv[1:]]).run()
