"""`chitu upgrade --check`: which processes of a running cluster would work beside processes of this release."""

from __future__ import annotations

from collections.abc import Callable

from chitu import __version__
from chitu.launch.router_client import RouterClient
from chitu.protocol import OLDEST_VERSION, PROTOCOL_VERSION
from chitu.protocol.releases import ADDED

HERE = f"this release ({__version__}, wire {OLDEST_VERSION} to {PROTOCOL_VERSION})"


def check_upgrade(client: RouterClient, say: Callable[[str], None]) -> int:
    """Say of the router and of each instance whether this release works with it, and what it lacks. Return the exit
    code: 0 if all do, so that processes may be replaced one by one, in any order. Raises the errors of `RouterClient`.
    """
    cluster = client.cluster()
    found = [_fits("router", cluster.version, cluster.protocol, say)]
    for one in cluster.instances:
        if one.status == "down":
            say(f"{one.name}: down")
            continue
        # A router of the older release does not tell; what is its member reads at least its version.
        found.append(_fits(one.name, one.release, one.protocol or cluster.protocol, say))
    if all(found):
        say("replace them one by one, in any order: `chitu drain NAME`, then start it with this release")
    else:
        say("do not mix: go through the releases between, or stop the cluster and start it with this release")
    return 0 if all(found) else 1


def _fits(name: str, release: str, protocol: int, say: Callable[[str], None]) -> bool:
    text = f"{name}: release {release or 'before 0.2.0'}, wire {protocol}"
    if protocol < OLDEST_VERSION:
        say(f"{text}: too old for {HERE}")
        return False
    if protocol > PROTOCOL_VERSION:
        say(f"{text}: newer than {HERE}; it decides whether it still speaks {PROTOCOL_VERSION}")
        return False
    lacks = sorted({one.needs for fields in ADDED.values() for one in fields.values() if one.version > protocol} - {""})
    say(f"{text}: works with {HERE}" + (f", without {', '.join(lacks)}" if lacks else ""))
    return True
