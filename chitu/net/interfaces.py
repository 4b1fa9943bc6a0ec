"""Which network interface leads to another machine. Linux only; nothing is sent."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SIOCGIFCONF = 0x8912
ENTRY_BYTES = 40
"""Size of an entry of SIOCGIFCONF: a name of 16 bytes, then an address of its family."""
MAX_ENTRIES = 1024
IPV6 = Path("/proc/self/net/if_inet6")


def address_towards(other: str) -> str:
    """Return this machine's address towards another machine, its own one towards itself; "" if there is none."""
    known = []
    with suppress(OSError, UnicodeError):
        known = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)
    for family, kind, _, _, address in sorted(known, key=lambda info: info[0] is not socket.AF_INET):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def interface_towards(other: str) -> str:
    """Return the name of the interface that has this machine's address towards another machine; "" if there is none. To
    itself it is the one that has its address, not loopback."""
    address = address_towards(other).partition("%")[0]
    return next((name for name, own in _addresses() if address and own == ipaddress.ip_address(address)), "")


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield the name of an interface with each of its addresses."""
    entries = array.array("B", bytes(ENTRY_BYTES * MAX_ENTRIES))
    asked = struct.pack("iP", len(entries), entries.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        length, _ = struct.unpack("iP", fcntl.ioctl(any_socket, SIOCGIFCONF, asked))
    data = entries.tobytes()[:length]
    for entry in (data[start : start + ENTRY_BYTES] for start in range(0, length, ENTRY_BYTES)):
        name = entry[:16].partition(b"\0")[0].decode()
        yield name.partition(":")[0], ipaddress.IPv4Address(entry[20:24])  # eth0:1 is an address of eth0
    with suppress(OSError):
        for line in IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
