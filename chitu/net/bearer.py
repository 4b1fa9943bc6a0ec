"""`Authorization: Bearer ...`, compared in constant time. Pure; used by the API port and by the bootstrap server."""

from __future__ import annotations

import hmac
from collections.abc import Iterable


def bearer(authorization: bytes | None) -> bytes | None:
    """Return the credential of the header; None if there is none."""
    scheme, _, credential = (authorization or b"").partition(b" ")
    return credential.strip() or None if scheme.lower() == b"bearer" else None


def is_bearer(authorization: bytes | None, known: Iterable[bytes]) -> bool:
    """Return whether the header has one of the `known` credentials. The time it takes reveals only how many there
    are."""
    given = bearer(authorization)
    if given is None:
        return False
    return any([hmac.compare_digest(given, credential) for credential in known])
