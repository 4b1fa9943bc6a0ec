"""Prefix affinity: the instance that was sent the beginning of the prompt before, as far as the load allows.

It pays if instances keep the KV of prompts that they computed: turns of one chat, one long document, one system prompt.
A match and the load are compared as one cost (`prefix_index.py` has the worth of a match). So an owner is passed over
once it is that much busier, and the instance that takes the request instead becomes an owner too: a beginning that
every request uses spreads as far as its load needs, a short one at once.
"""

from __future__ import annotations

from chitu.router.routing.least_loaded import least_loaded
from chitu.router.routing.policy import InstanceGroup, RoutingRequest


def prefix_affinity(request: RoutingRequest, group: InstanceGroup) -> int:
    """Return the least loaded position, unless an owner's match is worth more than the load that it has beyond that."""
    chosen = least_loaded(request, group)
    if not request.matches:
        return chosen
    costs = group.costs
    unit = 1 if group.counts_tokens else 1 / request.num_tokens
    best: float = costs[chosen]
    for key, worth in request.matches.items():
        position = group.positions.get(key)
        if position is not None and costs[position] - unit * worth < best:
            best, chosen = costs[position] - unit * worth, position
    return chosen
