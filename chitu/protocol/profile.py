"""The order to record what an instance computes (`POST /admin/profile`)."""

from __future__ import annotations

from chitu.protocol.wire import Wire

PROFILE_VERSION = 21
"""Version of the wire since which instances take it."""


class ProfileOrder(Wire, frozen=True, tag="profile"):
    """Router -> instance: record the steps from now on, until one of the two bounds is reached. It may be lost."""

    incarnation: int
    label: str
    """Begins the names of the files: letters, digits and `-`."""
    seconds: float
    steps: int
