"""Addresses of a cluster's machines by name, as all of the machines know them: IPv4, else IPv6.

Called by the launch scripts and `chitu doctor` with all machines, by `chitu node` for its own. On Debian a machine's
own name is 127.0.1.1, at which no other machine reaches it: its address is then the one from which it reaches another.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence

from chitu.config.schema import Topology
from chitu.config.topology import host_names, is_address, is_loopback
from chitu.config.topology_checks import PLACEHOLDER_SUFFIX
from chitu.errors import ConfigError
from chitu.net.interfaces import address_towards


def addresses_of(names: Sequence[str]) -> list[str]:
    """Return the address of each name; addresses stay. Raise ConfigError for a name without one."""
    return [_address_of(name, [other for other in names if other != name]) for name in names]


def with_own_address(names: Sequence[str], index: int) -> list[str]:
    """Return the names of a cluster's machines with the address of this one, number `index`, in place of its name. The
    others stay and are looked up anew at each connection, since these machines may start later or move.

    Raise ConfigError if the own name has no address here, and is not the host name of this machine either.
    """
    own, others = names[index], [name for name in names if name != names[index]]
    try:
        address = _address_of(own, others)
    except ConfigError:
        # A pod's name in its service may exist only once it is ready; its host name always has its address.
        if own.partition(".")[0] != socket.gethostname().partition(".")[0]:
            raise
        address = _address_of(socket.gethostname(), others)
    return [*names[:index], address, *names[index + 1 :]]


def address_problems(topology: Topology) -> Iterator[str]:
    """Yield a sentence for each host of a topology of several that has no address here."""
    names = host_names(topology)
    for name in names if len(names) > 1 else ():
        if name and not name.endswith(PLACEHOLDER_SUFFIX):  # `problems` names those
            try:
                addresses_of([name])
            except ConfigError as error:
                yield error.message


def _address_of(name: str, others: Sequence[str]) -> str:
    if is_address(name):
        return name
    try:
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the name {name} has no address here (getent ahosts {name}): {error}") from error
    found = [str(info[4][0]) for info in known]
    addresses = [address for address in found if ":" not in address] or [a for a in found if "%" not in a] or found
    outside = [address for address in addresses if not is_loopback(address)]
    if not outside and not is_loopback(name):
        towards = [address_towards(other) for other in others]
        outside = [address for address in towards if address and not is_loopback(address)]
    return [*outside, *addresses][0]


def main(names: Sequence[str]) -> int:
    try:
        print(",".join(addresses_of(names)))
    except ConfigError as error:
        print(f"chitu: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
