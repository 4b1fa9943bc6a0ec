"""What HTTP clients may take of a process, and the count of what they took. For `HTTPServer` and its connections."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

PROBE_PATHS = frozenset({"/health", "/livez"})
"""Answered beyond `max_connections`, too: a full server is not a sick one."""
PROBE_CONNECTIONS = 64
"""This many connections beyond `max_connections` may still send a request's head; the next one replaces the oldest."""
PROBE_HEAD_S = 1.0
"""How long they have to send it."""
FREE_BODY_BYTES = 64 << 10
"""Of each body, outside the budget, so that small bodies never wait for large ones; the connections bound their sum.
Also what is taken of a body that nobody reads yet."""
LINGER_BYTES = 64 << 20
"""Of one request or behind the last one, thrown away unread; a client that sends more is cut off."""
SPARE_DESCRIPTORS = 256
"""For everything that is no client's connection."""


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """For one server. What they protect is this process; requests have bounds of their own."""

    max_connections: int = 8192
    """Open at once, in this process; fewer if its limit of descriptors is lower."""
    max_headers: int = 100
    max_head_bytes: int = 64 << 10
    """Request line and headers."""
    max_total_body_bytes: int = 256 << 20
    """Held at once for all requests, beyond the first `FREE_BODY_BYTES` of each."""
    head_s: float = 10.0
    """From a connection's start, or the first byte of a later request, to the end of the headers."""
    body_s: float = 60.0
    """From there to the end of the body."""
    write_s: float = 60.0
    """A client that reads nothing of what is written to it for this long is cut off."""
    linger_s: float = 5.0
    """For a client that still sends to see that it was answered for the last time."""
    keep_alive_s: float = 75.0
    """Between two requests."""


class BodyBudget:
    """Bytes of bodies that one server holds at once, beyond the first `FREE_BODY_BYTES` of each."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """False, and nothing is taken, where that would be too many."""
        if self.held_bytes + num_bytes > self.limit_bytes:
            return False
        self.held_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def within_descriptors(limits: HTTPLimits) -> HTTPLimits:
    """The most connections that leave the process descriptors of its own; it may take all that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = PROBE_CONNECTIONS + SPARE_DESCRIPTORS
    wanted = limits.max_connections + others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(limits, max_connections=max(1, min(limits.max_connections, soft - others)))
    return limits
