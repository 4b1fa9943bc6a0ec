"""What a `cluster_key` becomes: one CURVE key pair for all ZMQ sockets of the cluster, one token for its HTTP calls.

`derive` is pure and slow on purpose (scrypt, about 50 ms); every process calls it once at its start. `make_context`
makes the ZMQ context of the process: every socket opened in it (`net/sockets.py`) is encrypted and authenticated, or is
not opened. Both ends of a connection hold the same pair. A client proves that it knows the server's public key, which
is never sent, and a `zap` thread per context accepts only that public key as a client's (ZAP, ZeroMQ RFC 27). Without a
`cluster_key` there is no thread, and sockets are plain.

Invariant: in a context with secrets nothing is sent or received in clear over TCP; if the `zap` thread is missing or
dead, every new connection is refused (ZAP_ENFORCE_DOMAIN).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import resource
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from chitu.config.cluster_key import why_refused
from chitu.errors import ConfigError, MissingDependency
from chitu.net.threads import ServiceThread

logger = logging.getLogger(__name__)

SALT = b"chitu cluster_key 1"
"""Fixed, because no other value is known to all processes; `cluster_key` is meant to be random anyway."""
CURVE_LABEL = b"curve"
TOKEN_LABEL = b"token"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"chitu"
ZAP_VERSION = b"1.0"
MAX_SOCKETS = 65_535
"""Most sockets of one context that libzmq can number. Its default, 1023, would limit a cluster to 1019 instances."""
MAX_DESCRIPTORS = 1 << 20
"""Most descriptors that are taken, even if the system would give more."""


@dataclass(frozen=True, slots=True)
class ClusterSecrets:
    """The secrets of a cluster. No field is ever logged, shown or written."""

    curve_public: bytes = field(repr=False)
    """Z85, 40 characters. A secret too: a server answers only a client that has it."""
    curve_secret: bytes = field(repr=False)
    """Z85, 40 characters."""
    token: str = field(repr=False)
    """64 hexadecimal digits, for `Authorization: Bearer`."""


def derive(cluster_key: str) -> ClusterSecrets | None:
    """Return the secrets of a cluster; None without a key. Raises ConfigError for a weak key, MissingDependency without
    CURVE."""
    if not cluster_key:
        return None
    if problem := why_refused(cluster_key):
        raise ConfigError(problem)
    if not zmq.has("curve"):
        raise MissingDependency("cluster_key needs CURVE, which this libzmq was built without: use the pyzmq of PyPI")
    master = hashlib.scrypt(cluster_key.encode(), salt=SALT, n=1 << 14, r=8, p=1, dklen=32)
    secret = z85.encode(_labelled(master, CURVE_LABEL))
    return ClusterSecrets(zmq.curve_public(secret), secret, _labelled(master, TOKEN_LABEL).hex())


def _labelled(master: bytes, label: bytes) -> bytes:
    """Return 32 bytes that reveal nothing about those of another label."""
    return hashlib.blake2b(label, key=master, digest_size=32).digest()


def make_context(secrets: ClusterSecrets | None) -> zmq.Context[zmq.Socket[bytes]]:
    """Make the ZMQ context of a process. `context.term()` ends its `zap` thread too.

    The process gets all descriptors that the system allows, since every connection from outside the cluster takes one
    until its handshake is overdue (`HANDSHAKE_MS` of net/sockets.py).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    if secrets is None:
        return context
    # Through a shadow, so that `context.destroy()`, in another thread, does not close the thread's socket under it.
    gate: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    gate.setsockopt(zmq.LINGER, 0)
    gate.bind(ZAP_ADDRESS)
    ServiceThread("zap", lambda: _admit(gate, z85.decode(secrets.curve_public))).start()
    # For every socket from here on. `bind` of net/sockets.py makes it a server and checks that all this took effect.
    context.setsockopt(zmq.CURVE_PUBLICKEY, secrets.curve_public)
    context.setsockopt(zmq.CURVE_SECRETKEY, secrets.curve_secret)
    context.setsockopt(zmq.CURVE_SERVERKEY, secrets.curve_public)
    return context


def is_secret(context: zmq.Context[zmq.Socket[bytes]]) -> bool:
    """Return whether sockets of this context have to use CURVE."""
    return zmq.CURVE_SERVERKEY in context.sockopts


def serve_curve(socket: zmq.Socket[bytes]) -> None:
    """Make the socket accept only holders of the cluster's key pair. Call it before `bind`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def require_curve(socket: zmq.Socket[bytes]) -> None:
    """Raise ConfigError if the socket did not take the keys: a context applies its options without reporting
    failures."""
    if socket.getsockopt(zmq.MECHANISM) != zmq.CURVE:
        socket.close()
        raise ConfigError("cannot enable CURVE on a ZMQ socket; it is not opened unencrypted")


def _admit(gate: zmq.Socket[bytes], public_key: bytes) -> None:
    """Answer libzmq's ZAP requests about new connections until the context ends."""
    with contextlib.suppress(zmq.ContextTerminated):
        while True:
            _version, request_id, *question = gate.recv_multipart()
            address = question[1].decode("ascii", "replace") if len(question) > 1 else "?"
            # domain, address, identity, mechanism, the client's public key
            is_ours = len(question) == 5 and question[3] == b"CURVE" and hmac.compare_digest(question[4], public_key)
            if not is_ours:
                logger.warning("refused a connection from %s: not a key of this cluster", address)
            status = (b"200", b"OK") if is_ours else (b"400", b"unknown key")
            gate.send_multipart([ZAP_VERSION, request_id, *status, b"", b""])
    gate.close()
