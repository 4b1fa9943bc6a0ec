"""The router's `GET /health`. Called by the launchers, which wait for it."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """One answer. `joined` has the incarnation of every instance that takes requests, by name."""

    is_usable: bool
    """Whether a request can be served now."""
    joined: dict[str, int]


def ask_health(host: str, port: int, timeout_s: float = 1.0) -> Health | None:
    """Return the router's health, or None if no valid answer arrives within `timeout_s`."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        body = json.loads(reply.read())
        joined = {item["name"]: int(item["incarnation"]) for item in body["instances"] if not item["draining"]}
        return Health(reply.status == 200, joined)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None
    finally:
        connection.close()
