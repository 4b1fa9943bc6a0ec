"""What the kernel still sends to a host on connections that were closed already (Linux, /proc/net/tcp).

Covers the network namespace of the calling thread.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

CLOSING_STATES = {"04", "09", "0B"}
"""FIN_WAIT1, LAST_ACK, CLOSING: closed here, with bytes or the FIN not acknowledged by the other kernel."""


def has_unacknowledged(host: str) -> bool:
    """Return whether a closed connection to `host` (any port) holds bytes that its kernel has not acknowledged.

    Conservative: True if that cannot be known.
    """
    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        addresses = {_mapped(ipaddress.ip_address(text)) for text in wanted}
        for path in ("/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"):
            with open(path) as table:
                next(table)
                for line in table:
                    fields = line.split()
                    if fields[3] in CLOSING_STATES and _parse(fields[2].split(":")[0]) in addresses:
                        return True
    except (OSError, ValueError, StopIteration):
        return True
    return False


def _mapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """Return an address as an IPv6 number; IPv4 as its mapped form."""
    return int(address) if address.version == 6 else (0xFFFF << 32) | int(address)


def _parse(text: str) -> int:
    """Parse an address, which the kernel prints as 32 bit words of host byte order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    return _mapped(ipaddress.ip_address(b"".join(words)))
