"""A peer without the cluster's key gets no message in and none out, over real sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from chitu.errors import ConfigError
from chitu.net.curve import ClusterSecrets, derive, make_context
from chitu.net.sockets import bind, connect

KEY = "correct horse battery staple"
Context = zmq.Context[zmq.Socket[bytes]]
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED  # if the other side gave up first
)
WATCHED = FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED


@dataclass(slots=True)
class Cluster:
    secrets: ClusterSecrets
    context: Context

    def open(self, kind: int) -> tuple[zmq.Socket[bytes], int, zmq.Socket[bytes]]:
        """Return a server, its port, and a monitor of the handshakes there."""
        socket, port = bind(self.context, kind, "127.0.0.1", 0)
        return socket, port, socket.get_monitor_socket(WATCHED)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    secrets = derive(KEY)
    assert secrets is not None
    context = make_context(secrets)
    yield Cluster(secrets, context)
    context.destroy(0)


def without_curve(_cluster: ClusterSecrets) -> Context:
    return zmq.Context()


def of_another_cluster(_cluster: ClusterSecrets) -> Context:
    return make_context(derive(KEY + "r"))


def with_the_server_key_alone(cluster: ClusterSecrets) -> Context:
    public, secret = zmq.curve_keypair()
    context: Context = zmq.Context()
    context.setsockopt(zmq.CURVE_PUBLICKEY, public)
    context.setsockopt(zmq.CURVE_SECRETKEY, secret)
    context.setsockopt(zmq.CURVE_SERVERKEY, cluster.curve_public)
    return context


def claiming_our_public_key(cluster: ClusterSecrets) -> Context:
    """Return a context that has both public keys, but not the secret one."""
    context = with_the_server_key_alone(cluster)
    context.setsockopt(zmq.CURVE_PUBLICKEY, cluster.curve_public)
    return context


INTRUDERS = [without_curve, of_another_cluster, with_the_server_key_alone, claiming_our_public_key]


def wait_refused(monitor: zmq.Socket[bytes]) -> None:
    assert monitor.poll(10_000), "no handshake failed"
    assert recv_monitor_message(monitor)["event"] & FAILED


@pytest.mark.parametrize("make_intruder", INTRUDERS)
def test_an_intruder_gets_nothing_in(cluster: Cluster, make_intruder: Callable[[ClusterSecrets], Context]) -> None:
    server, port, refusals = cluster.open(zmq.PULL)
    context = make_intruder(cluster.secrets)
    intruder = context.socket(zmq.PUSH)
    intruder.connect(f"tcp://127.0.0.1:{port}")
    intruder.send(b"of an intruder")
    wait_refused(refusals)
    friend = connect(cluster.context, zmq.PUSH, "127.0.0.1", port)
    friend.send(b"of a friend")
    assert server.poll(10_000)
    assert server.recv() == b"of a friend"
    assert not server.poll(0)
    server.disable_monitor()
    context.destroy(0)


@pytest.mark.parametrize("make_intruder", INTRUDERS)
def test_an_intruder_gets_nothing_out(cluster: Cluster, make_intruder: Callable[[ClusterSecrets], Context]) -> None:
    server, port, refusals = cluster.open(zmq.XPUB)  # a PUB that reports its subscribers
    context = make_intruder(cluster.secrets)
    intruder = context.socket(zmq.SUB)
    intruder.setsockopt(zmq.SUBSCRIBE, b"")
    intruder.connect(f"tcp://127.0.0.1:{port}")
    wait_refused(refusals)
    friend = connect(cluster.context, zmq.SUB, "127.0.0.1", port)
    friend.setsockopt(zmq.SUBSCRIBE, b"")
    assert server.poll(10_000)
    server.recv()
    server.send(b"view")
    assert friend.poll(10_000)
    assert friend.recv() == b"view"
    assert not intruder.poll(0)
    server.disable_monitor()
    context.destroy(0)


def test_a_client_with_the_key_does_not_talk_to_a_server_without(cluster: Cluster) -> None:
    plain: Context = zmq.Context()
    impostor, port = bind(plain, zmq.PULL, "127.0.0.1", 0)
    for _ in range(20):  # a refused client stays away, and the monitor may come too late for the only handshake
        client = connect(cluster.context, zmq.PUSH, "127.0.0.1", port)
        refusals = client.get_monitor_socket(WATCHED)
        client.send(b"secret")
        if refusals.poll(500):
            break
        client.disable_monitor()
    wait_refused(refusals)
    assert not impostor.poll(0)
    client.disable_monitor()
    plain.destroy(0)


def test_a_message_does_not_cross_the_wire_in_clear(cluster: Cluster) -> None:
    """A relay between client and server records every byte."""
    server, port, _ = cluster.open(zmq.PULL)
    relay = zmq.Context()
    outside, inside = relay.socket(zmq.STREAM), relay.socket(zmq.STREAM)
    relay_port = outside.bind_to_random_port("tcp://127.0.0.1")
    client = connect(cluster.context, zmq.PUSH, "127.0.0.1", relay_port)
    inside.connect(f"tcp://127.0.0.1:{port}")
    to_server, to_client = inside.getsockopt(zmq.IDENTITY), b""
    assert isinstance(to_server, bytes)
    client.send(b"what is my PIN")
    seen = b""
    poller = zmq.Poller()
    for socket in (outside, inside, server):
        poller.register(socket, zmq.POLLIN)
    received = None
    while received is None:
        ready = dict(poller.poll(10_000))
        assert ready, "the relay stands still"
        if outside in ready:
            to_client, data = outside.recv_multipart()
            seen += data
            if data:
                inside.send_multipart([to_server, data])
        if inside in ready and to_client:  # the server may speak before the client has come
            to_server, data = inside.recv_multipart()
            seen += data
            if data:
                outside.send_multipart([to_client, data])
        if server in ready:
            received = server.recv()
    assert received == b"what is my PIN"
    assert b"CURVE" in seen  # proves that the relay saw the handshake
    assert b"PIN" not in seen
    relay.destroy(0)
    server.disable_monitor()


def test_the_end_of_a_context_ends_its_thread(cluster: Cluster) -> None:
    before = len(os.listdir("/proc/self/task"))
    context = make_context(cluster.secrets)
    assert len(os.listdir("/proc/self/task")) > before
    context.term()


def test_a_context_has_sockets_for_thousands_of_peers() -> None:
    context = make_context(None)
    sockets = [context.socket(zmq.PUSH) for _ in range(2000)]
    for socket in sockets:
        socket.close(0)
    context.term()


def test_without_a_key_everything_is_plain() -> None:
    context = make_context(derive(""))
    server, port = bind(context, zmq.PULL, "127.0.0.1", 0)
    client = connect(context, zmq.PUSH, "127.0.0.1", port)
    client.send(b"hello")
    assert server.poll(10_000)
    assert server.recv() == b"hello"
    assert server.getsockopt(zmq.MECHANISM) == zmq.NULL
    context.destroy(0)


def test_all_processes_derive_the_same_secrets_and_other_clusters_others() -> None:
    ours, again, theirs = derive(KEY), derive(KEY), derive(KEY + " ")
    assert ours is not None and theirs is not None
    assert ours == again
    assert len({ours.token, ours.curve_public, ours.curve_secret, theirs.token, theirs.curve_public}) == 5
    # Other releases must derive the same values: a change of this line is a change of the protocol.
    assert ours.token[:16] == "f8913200239f5d27"
    assert ours.token not in repr(ours) and ours.curve_secret.decode() not in repr(ours)


def test_a_short_key_is_refused_by_name_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="cluster_key") as caught:
        derive("fifteen letters")
    assert "fifteen letters" not in caught.value.message
