"""What the router shows of the cluster and of its requests: the body of `GET /cluster`, and the events of its stream.

Made by `http/fleet/snapshot.py`; read by the web page, `chitu chat`, the launchers and the quickstart. Times named
`_at_s` are on the router's monotonic clock and mean something only relative to `time_s` of the same snapshot; the
others are spans.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from chitu.protocol.account import RequestSnapshot
from chitu.protocol.admin import Canary
from chitu.protocol.cluster import KVLayout, LoadReport
from chitu.protocol.first_prompt import FirstPrompt

InstanceStatus = Literal["up", "draining", "asleep", "down"]
"""`asleep`: it has given memory back (`/admin/sleep`), and serves once it wakes. `down`: the topology has it, the
cluster view does not (not yet, or its lease ended)."""


class InstanceSnapshot(msgspec.Struct, frozen=True):
    name: str
    """`P0`, `D1`, `U0`."""
    role: str
    status: InstanceStatus
    host: str
    pid: int
    """0 while down."""
    incarnation: str
    """Decimal; a string because it does not fit a JavaScript number. Empty while down."""
    load: LoadReport | None
    """Load in its last heartbeat; None while down."""
    layout: KVLayout | None = None
    """Shape of its pages and logits rows, from which the bytes that a request moves can be computed beforehand
    (`test/verify_xpyd_topology.py`). `tp_size` is left out if it is 1. None while down."""
    becomes: str = ""
    """Name under which it will join, if it changes its role."""
    home: str = ""
    """Name with which its process was started, if it has changed its role since."""
    group: tuple[str, ...] = ()
    """Names of the members of its group that are in the cluster, itself included, by data rank. Empty if it is in none,
    or down."""
    release: str = ""
    """Release that it runs. Empty while down, and before version 21 of the wire."""
    protocol: int = 0
    """Newest version of the wire that it reads; 0 while down."""
    revision: str = ""
    """Label of its image, weights or configuration, within which requests stay. Empty while down."""


class ClusterSnapshot(msgspec.Struct, frozen=True):
    model: str
    version: str
    max_model_len: int | None
    """None while no instance can serve."""
    page_size: int
    """Tokens per page."""
    transport: str
    """Transport of KV between P and D: as configured (`shm`, `mooncake`), or what `auto` resolves to for the instances
    in the cluster; `auto` while there are none."""
    time_s: float
    router_incarnation: str
    in_flight: int
    instances: tuple[InstanceSnapshot, ...]
    """All instances of the topology, P first, in rank order."""
    requests: tuple[RequestSnapshot, ...]
    """Requests that the reader may see (of an API key: those of its tenant), oldest first: the last ones that ended,
    and those that run. All other numbers are of the whole cluster."""
    first_prompt: FirstPrompt
    """What a user may ask this model first."""
    protocol: int = 20
    """Newest version of the wire that the router reads."""
    canary: Canary | None = None
    """Revision whose share of the requests an operator has set."""
    advice: str = ""
    """What the balancer would change, and why, and an instance that is slow (`router.balance`); empty if nothing is
    due."""
