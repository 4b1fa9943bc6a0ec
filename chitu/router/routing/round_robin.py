"""Round robin: every instance in turn, whatever the load."""

from __future__ import annotations

from chitu.router.routing.policy import InstanceGroup, RoutingRequest


def round_robin(request: RoutingRequest, group: InstanceGroup) -> int:
    return request.turn % len(group.instances)
