"""`chitu drain D1`: has the router drain an instance and reports when it left. Blocking; in the caller's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from chitu.client.client import RouterClient
from chitu.config.load import api_key, cluster_key
from chitu.config.topology import is_loopback
from chitu.launch.run_dir import cluster_key_at
from chitu.net.curve import derive
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


def drain(client: RouterClient, name: str, *, force: bool, wait: bool, say: Callable[[str], None]) -> None:
    """Drain an instance. Return once it has left the cluster (`wait`), or once the router sends it nothing new.

    The drain goes on if the wait is interrupted. Raise UnknownInstance, LastInstance (without `force`), and the errors
    of `RouterClient`.
    """
    name = name.upper()
    incarnation = client.drain(name, force)
    say(f"{name} drains: it gets no new requests, finishes what runs, and leaves")
    shown = -1
    while wait:
        instance = _find(client.cluster(), name)
        if instance is None or instance.incarnation != incarnation:
            say(f"{name} has left; its process has ended or is about to, with exit code 0")
            return
        load = instance.load
        left = load.waiting + load.transferring + load.running + load.retracted if load is not None else 0
        if left != shown:
            shown = left
            say(f"{name}: {left} requests left")
        time.sleep(POLL_S)


def _find(snapshot: ClusterSnapshot, name: str) -> InstanceSnapshot | None:
    return next((instance for instance in snapshot.instances if instance.name == name), None)
