"""Limits on what HTTP clients may use of a process, and the count of what they use. For `HTTPServer` and its
connections."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

from chitu.config.schema import RouterConfig

PROBE_PATHS = frozenset({"/health", "/livez"})
"""Paths answered beyond `max_connections` too: a full server is not an unhealthy one."""
PROBE_CONNECTIONS = 64
"""This many connections beyond `max_connections` may still send a request's head; the next one replaces the oldest."""
PROBE_HEAD_S = 1.0
"""Time that these connections have to send the head."""
FREE_BODY_BYTES = 64 << 10
"""Bytes of each body outside the budget, so that small bodies never wait for large ones; the number of connections
bounds their sum. Also the bytes that are taken of a body before a reader asks for it."""
LINGER_BYTES = 64 << 20
"""Bytes of one request, or after the last one, that are discarded unread; a client that sends more is cut off."""
PROGRESS_BYTES = 1 << 20
"""So much of a body that is read in parts (a file) must come within `body_s`, and so much again."""
SPARE_DESCRIPTORS = 256
"""Descriptors for everything except client connections."""


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """Limits of one server. They protect this process; requests have bounds of their own."""

    max_connections: int = 8192
    """Connections open at once in this process; fewer if its limit of descriptors is lower."""
    max_headers: int = 100
    max_head_bytes: int = 64 << 10
    """Size of the request line and the headers."""
    max_total_body_bytes: int = 256 << 20
    """Bytes of bodies held at once for all requests, beyond the first `FREE_BODY_BYTES` of each."""
    head_s: float = 10.0
    """Timeout from a connection's start, or the first byte of a later request, to the end of the headers."""
    body_s: float = 60.0
    """Timeout from the end of the headers to the end of the body."""
    write_s: float = 60.0
    """A client that reads nothing of what is written to it for this long is cut off."""
    linger_s: float = 5.0
    """Time that a client that still sends has to see that it got its last answer."""
    keep_alive_s: float = 120.0
    """Timeout between two requests."""

    @classmethod
    def of(cls, config: RouterConfig) -> HTTPLimits:
        """Return the limits of the API's server."""
        return cls(max_total_body_bytes=config.max_total_body_bytes, keep_alive_s=config.keep_alive_s)


class BodyBudget:
    """Bytes of bodies that one server holds at once, beyond the first `FREE_BODY_BYTES` of each."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Take the bytes. Return False, and take nothing, if the limit would be exceeded."""
        if self.held_bytes + num_bytes > self.limit_bytes:
            return False
        self.held_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


def within_descriptors(limits: HTTPLimits) -> HTTPLimits:
    """Return limits with at most as many connections as leave descriptors for the process, which has asked for all that
    it may have (`make_context` of net/curve.py)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    left = soft - PROBE_CONNECTIONS - SPARE_DESCRIPTORS
    return replace(limits, max_connections=max(1, min(limits.max_connections, left)))
