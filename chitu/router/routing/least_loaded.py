"""Least loaded: P by prompt tokens still to compute, the others by requests; ties go round robin."""

from __future__ import annotations

from chitu.router.routing.policy import InstanceGroup, RoutingRequest


def least_loaded(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the position of the least cost. Two passes over small integers: microseconds with a thousand instances."""
    costs = group.costs
    least = min(costs)
    try:
        return costs.index(least, request.turn % len(costs))
    except ValueError:
        return costs.index(least)
