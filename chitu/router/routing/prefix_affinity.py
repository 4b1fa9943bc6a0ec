"""Prefix affinity: where the beginning of the prompt was sent before, as far as the load allows. One cost for both.

Worth its while where instances keep the KV of prompts that they computed: turns of one chat, one long document, one
system prompt. What finding it is worth (`prefix_index.py`) is set against the load. So an owner is passed over once it
has fallen that far behind, and the instance that takes the request instead becomes an owner too: a beginning that
everyone uses spreads as far as its load needs, a short one at once.
"""

from __future__ import annotations

from chitu.router.routing.least_loaded import least_loaded
from chitu.router.routing.policy import InstanceGroup, RoutingRequest


def prefix_affinity(request: RoutingRequest, group: InstanceGroup) -> int:
    """The least loaded, unless an owner's match is worth more than it is behind."""
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
