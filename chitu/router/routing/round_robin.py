"""Round robin: everyone in turn, whatever the load."""

from __future__ import annotations

from chitu.router.routing.policy import Group, RoutingRequest


def round_robin(request: RoutingRequest, group: Group) -> int:
    return request.turn % len(group.instances)
