"""Prefix affinity: where the beginning of the prompt was sent before, as far as the load allows. One cost for both.

Worth its while where instances keep the KV of prompts that they computed: turns of one chat, one long document, one
system prompt. Finding a token there is worth standing behind `PATIENCE` tokens of others more than elsewhere. So an
owner is passed over once it has fallen that far behind, and the instance that takes the request instead becomes an
owner too: a beginning that everyone uses spreads as far as its load needs, a short one at once.
"""

from __future__ import annotations

from chitu.router.routing.least_loaded import least_loaded
from chitu.router.routing.policy import InstanceGroup, RoutingRequest

PATIENCE = 8
"""Far more than the one token of computing that is saved: where a conversation goes to another instance it takes room
in both caches, and pushes out what others would have found."""


def prefix_affinity(request: RoutingRequest, group: InstanceGroup) -> int:
    """The least loaded, unless an owner's match is worth more than it is behind."""
    chosen = least_loaded(request, group)
    if not request.matches:
        return chosen
    costs = group.costs
    worth = PATIENCE if group.counts_tokens else PATIENCE / request.num_tokens
    best: float = costs[chosen]
    for key, tokens in request.matches.items():
        position = group.positions.get(key)
        if position is not None and costs[position] - worth * tokens < best:
            best, chosen = costs[position] - worth * tokens, position
    return chosen
