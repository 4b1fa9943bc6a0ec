"""Least loaded: P by prompt tokens still to compute, D by running requests; ties rotate."""

from __future__ import annotations

from collections.abc import Callable

from chitu.messages import InstanceInfo
from chitu.routing.policy import (
    Candidates,
    InstanceLoad,
    Loads,
    RoutingRequest,
    Target,
    instance_key,
    require_usable,
)

Cost = Callable[[InstanceLoad], tuple[int, int]]


def _prefill_cost(load: InstanceLoad) -> tuple[int, int]:
    """The router's own count is exact and at once; the report shows what other routers sent there."""
    return max(load.prompt_tokens, load.report.waiting_tokens), load.requests


def _decode_cost(load: InstanceLoad) -> tuple[int, int]:
    reported = load.report.waiting + load.report.transferring + load.report.running + load.report.retracted
    return max(load.requests, reported), load.prompt_tokens


def _cheapest(group: tuple[InstanceInfo, ...], cost: Cost, loads: Loads, ordinal: int) -> InstanceInfo:
    idle = InstanceLoad()
    start = ordinal % len(group)
    rotated = group[start:] + group[:start]
    return min(rotated, key=lambda instance: cost(loads.get(instance_key(instance), idle)))


def least_loaded(request: RoutingRequest, candidates: Candidates, loads: Loads) -> Target:
    """The P with the fewest prompt tokens outstanding and the D with the fewest requests. NoInstance where none is."""
    require_usable(candidates)
    if not candidates.has_pair:
        return Target(None, _cheapest(candidates.unified, _decode_cost, loads, request.ordinal))
    return Target(
        _cheapest(candidates.prefill, _prefill_cost, loads, request.ordinal),
        _cheapest(candidates.decode, _decode_cost, loads, request.ordinal),
    )
