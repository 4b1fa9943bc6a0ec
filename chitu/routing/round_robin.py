"""Round robin over pairs: every P and every D gets its even share, and every pair occurs."""

from __future__ import annotations

from math import lcm

from chitu.routing.policy import Candidates, Loads, RoutingRequest, Target, require_usable


def round_robin(request: RoutingRequest, candidates: Candidates, loads: Loads) -> Target:
    """Pair number `ordinal` of an enumeration of all pairs. NoInstance where no request can be served.

    Both indices advance with the ordinal; after each common period D shifts by one more, so that with 2P2D the pairs
    P0-D1 and P1-D0 occur as well as P0-D0 and P1-D1.
    """
    require_usable(candidates)
    n = request.ordinal
    if not candidates.has_pair:
        return Target(None, candidates.unified[n % len(candidates.unified)])
    num_prefill, num_decode = len(candidates.prefill), len(candidates.decode)
    shift = n // lcm(num_prefill, num_decode)
    return Target(candidates.prefill[n % num_prefill], candidates.decode[(n + shift) % num_decode])
