"""Which instances serve the weights that this one is to load, and what reads them from there.

An instance loads before it has joined, so it asks the routers for a view by itself: a whole one, as every reader of
views gets it. It asks anew when all sources were busy, since instances that have loaded meanwhile are sources, too.
Routers that are not there cost `VIEW_S` at most, and nothing on a host that refuses the connection.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import reached_hosts
from chitu.config.schema import PDDisaggregationConfig, Topology
from chitu.config.topology import Instance, has_lasting_tiers, has_tiers, inside_address, routers
from chitu.errors import ChituError, ProtocolError
from chitu.instance.weights_pieces import Neighbour, NeighbourPieces, SessionOpener
from chitu.instance.weights_share import WeightsShare, bind_share
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.transport import Transport
from chitu.net.curve import derive, make_context
from chitu.net.sockets import connect, listens
from chitu.net.view_feed import ViewReceiver
from chitu.protocol import PROTOCOL_VERSION, ClusterView, InstanceInfo, view_codec

if TYPE_CHECKING:
    from chitu.engine.weights import RankWeights

VIEW_S = 0.8
"""How long to wait for a view in all."""
SINCE_VERSION = 21
"""Version of the wire that has pieces."""

OpenPieces = Callable[[str, str], NeighbourPieces]


def pieces_of(topology: Topology, instance: Instance) -> OpenPieces | None:
    """Return what opens, for a folder and its hash, the bytes of its files from neighbours; None if the folder alone is
    to be read. Pages that outlast the cluster have keys of all bytes of the folder, so it is read then in any case."""
    way = topology.model.weights_from
    if way == "folder" or (has_tiers(topology, instance) and has_lasting_tiers(topology)):
        return None
    secrets = derive(cluster_key_of(topology))
    addresses = [
        (host, router.pd_disaggregation.metadata_sync_port)
        for host, router in zip(reached_hosts(topology), routers(topology), strict=True)
    ]
    config, opened = instance.config, partial(weights_transports, topology, instance)

    def opens(path: str, model_hash: str) -> NeighbourPieces:
        context = make_context(secrets)
        opener = SessionOpener(f"{instance.name} on {config.host}", model_hash, context, opened)
        find = partial(_sources, context, addresses, model_hash, (config.host, config.rack))
        return NeighbourPieces(find, opener, compares=way == "auto")

    return opens


def weights_transports(topology: Topology, instance: Instance) -> list[Transport]:
    """Return transports between buffers in host memory, the best first."""
    pd: PDDisaggregationConfig = topology.dp_config.router.pd_disaggregation
    if pd.transport == "cuda_ipc":  # the cluster is on one host
        pd = msgspec.structs.replace(pd, transport="shm")
    return open_transports(pd, instance.config.host, "cpu")


def share_of(
    topology: Topology, instance: Instance, context: zmq.Context[zmq.Socket[bytes]], weights: RankWeights | None
) -> WeightsShare | None:
    """Return what sends the weights of this instance to others, with its port bound; None if it sends them to nobody.
    Raises ConfigError if there is no port."""
    if topology.model.weights_from == "folder" or weights is None:
        return None
    opened = partial(weights_transports, topology, instance)
    return bind_share(context, inside_address(instance.config.host), lambda: weights.served, opened)


def _sources(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: Sequence[tuple[str, int]],
    model_hash: str,
    place: tuple[str, str],
) -> list[Neighbour]:
    view = ask_view(context, addresses)
    return sources_in(view, model_hash, *place) if view is not None else []


def sources_in(view: ClusterView, model_hash: str, host: str, rack: str) -> list[Neighbour]:
    """Return the members that serve these weights and send them, those near this host first, else in random order: so
    several that load at once ask different ones."""

    def distance(info: InstanceInfo) -> tuple[bool, bool, float]:
        return info.host != host, info.rack != rack, random.random()

    found = [
        info
        for info in view.instances
        if info.weights_port and info.protocol >= SINCE_VERSION and info.model_hash == model_hash
    ]
    return [
        Neighbour(info.name, info.incarnation, info.host, info.weights_port) for info in sorted(found, key=distance)
    ]


def ask_view(
    context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[tuple[str, int]], timeout_s: float = VIEW_S
) -> ClusterView | None:
    """Return the newest whole view of the first router that answers, or None. `addresses`: of the routers' metadata
    ports."""
    end_s = time.monotonic() + timeout_s
    poller, sockets = zmq.Poller(), []
    receiver = ViewReceiver(time.monotonic())
    assert receiver.protocol == PROTOCOL_VERSION
    try:
        for host, port in addresses:
            if not listens(host, port):
                continue
            with contextlib.suppress(ChituError):
                sub = connect(context, zmq.SUB, host, port)
                sockets.append(sub)
                sub.setsockopt(zmq.SUBSCRIBE, receiver.topic)
                poller.register(sub, zmq.POLLIN)
        while sockets and (left_s := end_s - time.monotonic()) > 0:
            for sub, _ in poller.poll(int(left_s * 1000) + 1):
                with contextlib.suppress(ProtocolError):
                    message = view_codec.decode(sub.recv_multipart()[-1])
                    if isinstance(message, ClusterView):
                        return message
        return None
    finally:
        for sub in sockets:
            sub.close(0)
