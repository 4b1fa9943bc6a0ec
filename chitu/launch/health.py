"""The router's `GET /health`. Called by the launchers, which wait for it."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Health:
    """One answer. `joined` has the incarnation of every instance that takes requests, by name."""

    is_usable: bool
    """Whether a request can be served now."""
    joined: dict[str, int]


def ask_health(url: str, timeout_s: float = 1.0) -> Health | None:
    """Return the health of the router at `url` (http or https, with a path or without one), or None if no valid answer
    arrives within `timeout_s`."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        reply = connection.getresponse()
        body = json.loads(reply.read())
        joined = {item["name"]: int(item["incarnation"]) for item in body["instances"] if not item["draining"]}
        return Health(reply.status == 200, joined)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None
    finally:
        connection.close()
