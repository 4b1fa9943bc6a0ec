"""Bootstrap (HTTP, port 8080): bodies in JSON."""

from __future__ import annotations

import msgspec

from chitu.protocol.cluster import KVLayout
from chitu.protocol.wire import Wire
from chitu.types import Role


class RouteGroup(msgspec.Struct, frozen=True):
    """The group of a wide instance, as `/route` shows it to a member of it (`GroupPlace`)."""

    id: str
    """Decimal; a string because it does not fit a JavaScript number."""
    dp_rank: int
    dp_size: int
    shares_experts: bool
    engine_ranks: tuple[int, ...]
    """Of the members that are in the cluster, by data rank: complete if there are `dp_size`."""


class RouteEntry(Wire, frozen=True):
    """`GET /route` reply: where a prefill instance takes registrations and TransferInfo."""

    role: Role
    engine_rank: int
    rank_ip: str
    rank_port: int
    tp_size: int
    incarnation: int
    layout: KVLayout
    group: RouteGroup | None = None
