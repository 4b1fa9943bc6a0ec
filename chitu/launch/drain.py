"""`chitu drain D1`: has the router drain an instance and reports when it left. `chitu drain --self`: those that a
launcher on this machine runs. Blocking; in the caller's thread."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from chitu.client.client import RouterClient
from chitu.config.load import api_key, cluster_key
from chitu.config.topology import is_loopback
from chitu.errors import ConfigError
from chitu.net.curve import derive
from chitu.process.run_dir import cluster_key_at, running_launchers
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot

POLL_S = 0.2


def credential(url: str) -> str | None:
    """Return the credential for the router: the token of `CHITU_CLUSTER_KEY`, else of the key that a launcher of this
    user on this machine made or has for it, else `CHITU_API_KEY`.

    Raise ConfigError for an invalid key.
    """
    secrets = derive(known_key(url))
    return secrets.token if secrets is not None else api_key()


def known_key(url: str) -> str:
    """Return `CHITU_CLUSTER_KEY`, else the key that a launcher of this user on this machine made or has, else ""."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        return cluster_key() or (cluster_key_at(parts.port or 80) if is_loopback(parts.hostname or "") else "")
    except ValueError:  # no URL or no port; RouterClient reports it better
        return ""


def drain(client: RouterClient, names: Sequence[str], *, force: bool, wait: bool, say: Callable[[str], None]) -> None:
    """Drain instances, all at once. Return once they have left the cluster (`wait`), or once the router sends them
    nothing new.

    The drain goes on if the wait is interrupted. Raise UnknownInstance, LastInstance (without `force`), and the errors
    of `RouterClient`.
    """
    left = {}
    for name in map(str.upper, names):
        left[name] = client.drain(name, force)
        say(f"{name} drains: it gets no new requests, finishes what runs, and leaves")
    shown: dict[str, int] = {}
    while wait and left:
        snapshot = client.cluster()
        for name, incarnation in list(left.items()):
            instance = _find(snapshot, name)
            if instance is None or instance.incarnation != incarnation:
                say(f"{name} has left; its process has ended or is about to, with exit code 0")
                del left[name]
                continue
            load = instance.load
            count = load.waiting + load.transferring + load.running + load.retracted if load is not None else 0
            if count != shown.get(name, -1):
                shown[name] = count
                say(f"{name}: {count} requests left")
        if left:
            time.sleep(POLL_S)


def drain_self(url: str | None, *, force: bool, wait: bool, say: Callable[[str], None]) -> None:
    """Drain what the launcher of this user on this machine, or in this container, runs, as `drain` does. An instance
    that is not in the cluster, as it has left or not joined yet, needs no drain. `url`: the router of its launcher, if
    it is to be that of one among several.

    Raise ConfigError if no such launcher runs here, or several do.
    """
    launchers = running_launchers()
    if url is not None:
        launchers = [one for one in launchers if one.url.rstrip("/") == url.rstrip("/")]
    if not launchers:
        of_it = f" with the router {url}" if url is not None else ""
        raise ConfigError(f"no launcher of this user{of_it} runs here (none has a folder in {tempfile.gettempdir()})")
    if len(launchers) > 1:
        each = "; ".join(f"{' '.join(one.instances) or 'the router alone'} of {one.url}" for one in launchers)
        raise ConfigError(f"{len(launchers)} launchers of this user run here ({each}): name one by its --url")
    (own,) = launchers
    secrets = derive(own.cluster_key)
    client = RouterClient(own.url, secrets.token if secrets is not None else api_key())
    present = {instance.name for instance in client.cluster().instances if instance.status != "down"}
    names = [name for name in own.instances if name in present]
    for name in own.instances:
        if name not in present:
            say(f"{name} is not in the cluster")
    if not own.instances:
        say("the launcher runs the router alone, which a signal drains (deadlines.drain_delay_s, drain_s)")
    drain(client, names, force=force, wait=wait, say=say)


def _find(snapshot: ClusterSnapshot, name: str) -> InstanceSnapshot | None:
    return next((instance for instance in snapshot.instances if instance.name == name), None)
