"""Prefix affinity: to where the beginning of the prompt was sent before, unless that one is overloaded.

Worth its while where instances keep the KV of prompts that they computed: turns of one chat, one long document, one
system prompt. The load decides when it must: an owner that has fallen too far behind is passed over, and the instance
that takes the request instead becomes an owner too. So a prefix that everyone uses spreads as far as its load needs.
"""

from __future__ import annotations

from chitu.router.routing.least_loaded import least_loaded
from chitu.router.routing.policy import Group, RoutingRequest

MIN_SHARE = 0.5
"""An owner must know at least so much of the prompt: a short system prompt in common is no reason to crowd."""
SLACK_REQUESTS = 4
"""An owner is overloaded when it is more than so many requests of this size ahead of the least loaded instance."""


def prefix_affinity(request: RoutingRequest, group: Group) -> int:
    """The owner of the longest match that is not overloaded (of equal ones the less loaded), else the least loaded."""
    chosen = least_loaded(request, group)
    costs = group.costs
    size = request.num_tokens if group.counts_tokens else 1
    limit = costs[chosen] + SLACK_REQUESTS * size
    longest = 0
    for key, tokens in request.matches.items():
        position = group.positions.get(key)
        if position is None or costs[position] > limit or tokens < MIN_SHARE * request.num_tokens:
            continue
        if tokens > longest or (tokens == longest and costs[position] < costs[chosen]):
            longest, chosen = tokens, position
    return chosen
