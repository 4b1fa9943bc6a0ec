"""What a launcher or an operator's command asks of the router: its health, a drain (`chitu drain`), a change
of role (`chitu role`), a Leave.

Blocking; in the caller's thread. A launcher sends a Leave on behalf of an instance that died. It names the incarnation,
so it never affects a restarted instance. Best effort within `LINGER_MS`: if it is lost, the lease expires later.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import api_key, cluster_key, reached_hosts
from chitu.config.schema import Topology
from chitu.config.topology import is_loopback, routers
from chitu.errors import ConfigError, Internal, UnknownInstance
from chitu.launch.router_client import RouterClient, RouterUnreachable
from chitu.net.client import NETWORK_ERRORS, Server
from chitu.net.curve import derive, make_context
from chitu.net.sockets import connect
from chitu.process.run_dir import cluster_key_at, running_launchers
from chitu.protocol import Leave, encode
from chitu.protocol.snapshot import ClusterSnapshot, InstanceSnapshot
from chitu.types import Role

POLL_S = 0.2
LINGER_MS = 500
REJOIN_S = 5.0
"""Time within which instances have joined a router that has started again."""
AWAY_S = 30.0
"""Time for which a drain waits for a router that is away: it may start again, or another one has the name."""


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


def drain(
    client: RouterClient,
    names: Sequence[str],
    *,
    force: bool,
    wait: bool,
    say: Callable[[str], None],
    patience_s: float = 0.0,
) -> None:
    """Drain instances, all at once. Return once they have left the cluster (`wait`), or once the router sends them
    nothing new.

    `patience_s`: time for which it asks again where the router is away, or has just started and knows no instance yet.
    The drain continues if the wait is interrupted, and the wait if the router starts again meanwhile. Raise
    UnknownInstance, LastInstance (without `force`), and the errors of `RouterClient`.
    """
    left = {}
    for name in map(str.upper, names):
        left[name] = _drained(client, name, force, patience_s)
        say(f"{name} drains: it gets no new requests, finishes its own, and leaves")
    shown: dict[str, int] = {}
    while wait and left:
        snapshot = _cluster_of(client)
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


def _drained(client: RouterClient, name: str, force: bool, patience_s: float) -> str:
    """Ask for the drain of an instance and return its incarnation."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            return client.drain(name, force)
        except (RouterUnreachable, UnknownInstance):
            if time.monotonic() >= end_s:
                raise
            time.sleep(POLL_S)


def _cluster_of(client: RouterClient) -> ClusterSnapshot:
    """Return the cluster as the router sees it. Raise RouterUnreachable if none has answered for `AWAY_S`."""
    end_s = time.monotonic() + AWAY_S
    while True:
        try:
            return client.cluster()
        except RouterUnreachable:
            if time.monotonic() >= end_s:
                raise
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
    up = [instance for instance in _cluster_of(client).instances if instance.status != "down"]
    present = {instance.home or instance.name: instance.name for instance in up}  # it may have another role now
    names = [present[name] for name in own.instances if name in present]
    for name in own.instances:
        if name not in present:
            say(f"{name} is not in the cluster")
    if not own.instances:
        say("the launcher runs the router alone, which a signal drains (deadlines.drain_delay_s, drain_s)")
    drain(client, names, force=force, wait=wait, say=say, patience_s=REJOIN_S)


def change_role(
    client: RouterClient, name: str, role: Role, *, force: bool, wait: bool, say: Callable[[str], None]
) -> None:
    """Have an instance change its role. Return once it has joined as what it becomes (`wait`), or once the router sends
    it nothing new.

    The change continues if the wait is interrupted. Raise UnknownInstance, RoleRefused, LastInstance (without `force`),
    Internal if the instance has left instead, and the errors of `RouterClient`.
    """
    name, started_s = name.upper(), time.monotonic()
    before = _find(client.cluster(), name)
    home = name if before is None else before.home or name
    change = client.change_role(name, role, force)
    say(f"{name} becomes {change.becomes}: it gets no new requests, and finishes its own or gives them back")
    while wait:
        snapshot = client.cluster()
        old = _find(snapshot, name)
        up = [instance for instance in snapshot.instances if instance.status == "up" and instance.role == role]
        new = next((instance for instance in up if (instance.home or instance.name) == home), None)
        if new is not None:  # with another rank if that one was taken meanwhile
            say(f"{new.name} serves, {time.monotonic() - started_s:.1f} s after the call")
            return
        if old is None or old.incarnation != change.incarnation:
            raise Internal(f"{name} has left the cluster and has not joined as {change.becomes}: see its log")
        if old.becomes != change.becomes:
            why = "nothing else was left that serves" if old.status == "up" else "it was asked to leave"
            raise Internal(f"{name} does not become {change.becomes} any more: {why}")
        time.sleep(POLL_S)


def _find(snapshot: ClusterSnapshot, name: str) -> InstanceSnapshot | None:
    return next((instance for instance in snapshot.instances if instance.name == name), None)


def send_leaves(topology: Topology, leaves: Sequence[Leave]) -> None:
    """Send the leaves to all routers. Return once they are handed to the network, or after `LINGER_MS`."""
    context = make_context(derive(cluster_key_of(topology)))
    for host, router in zip(reached_hosts(topology), routers(topology), strict=True):
        socket = connect(context, zmq.DEALER, host, router.pd_disaggregation.coordination_port)
        for leave in leaves:
            socket.send(encode(leave), zmq.NOBLOCK)
        socket.close(LINGER_MS)
    context.term()


@dataclass(frozen=True, slots=True)
class Health:
    """One answer. `joined` has the incarnation of every instance that takes requests, by the name with which it was
    started."""

    is_usable: bool
    """Whether a request can be served now."""
    joined: dict[str, int]


def ask_health(url: str, timeout_s: float = 1.0) -> Health | None:
    """Return the health of the router at `url` (http or https, with a path or without one), or None if no valid answer
    arrives within `timeout_s`."""
    try:
        reply = Server.at(url).ask("GET", "/health", timeout_s=timeout_s)
        body = json.loads(reply.body)
        present = [item for item in body["instances"] if not item["draining"]]
        joined = {item["home"] or item["name"]: int(item["incarnation"]) for item in present}
        return Health(reply.status == 200, joined)
    except (*NETWORK_ERRORS, ValueError, LookupError, TypeError):
        return None
