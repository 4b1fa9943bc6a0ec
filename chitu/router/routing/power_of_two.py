"""Power of two choices: the less loaded of two that are drawn at random.

Nearly as even as least loaded, but several routers that see the same load reports do not all choose the same instance
(M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
"""

from __future__ import annotations

from chitu.router.routing.policy import InstanceGroup, RoutingRequest


def power_of_two(request: RoutingRequest, group: InstanceGroup) -> int:
    costs, entropy = group.costs, request.entropy
    if len(costs) == 1:
        return 0
    first = entropy % len(costs)
    second = (entropy >> 32) % (len(costs) - 1)
    if second >= first:
        second += 1
    return first if costs[first] <= costs[second] else second
