"""Leave messages of a launcher to the router on behalf of instances that died.

Called by `launch/node.py`, in its main thread, before it ends. A Leave names the incarnation, so it never affects a
restarted instance. Best effort within `LINGER_MS`: if it is lost, the lease expires later.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import router_host
from chitu.config.schema import Topology
from chitu.net.curve import derive, make_context
from chitu.net.sockets import connect
from chitu.protocol import Leave, encode

LINGER_MS = 500


def send_leaves(topology: Topology, leaves: Sequence[Leave]) -> None:
    """Send the leaves. Return once they are handed to the network, or after `LINGER_MS`."""
    context = make_context(derive(cluster_key_of(topology)))
    port = topology.dp_config.router.pd_disaggregation.coordination_port
    socket = connect(context, zmq.DEALER, router_host(topology), port)
    for leave in leaves:
        socket.send(encode(leave), zmq.NOBLOCK)
    socket.close(LINGER_MS)
    context.term()
