"""Ids and roles, which every other module uses.

Imports nothing of chitu. A *room* names one attempt of one request on one (P, D) pair; a *request id* is the client's
label and never a key. An *instance* is one torchrun; it is addressed as (role, engine_rank).
"""

from __future__ import annotations

import functools
import os
import uuid
from enum import Enum, StrEnum
from typing import Any, NewType, Protocol

Room = NewType("Room", bytes)
"""16 raw bytes (a UUID). Drawn by the router, one per attempt; a retry is a new room."""

REGISTRATION_ROOM = Room(bytes(16))
"""Room 0: the frame registers a peer instead of belonging to a request."""

Incarnation = NewType("Incarnation", int)
"""Names one process for ever: random, never 0, and without an order. The router decides which process is an instance
now."""


FAKE_MODEL = "fake:checksum"
"""Model hash of instances that compute no model (`chitu serve --fake`): no other instance pairs with them."""


class Role(StrEnum):
    """What an instance does. `unified` runs both halves in one process, without a transfer. `encode` computes features
    of images for P, and takes no requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    ENCODE = "encode"

    @property
    def letter(self) -> str:
        """P, D, U or E, as logs and the topology check print instances."""
        return self[0].upper()


class Ready(Protocol):
    """A point in a device's queue of work, passed once everything launched before it is done. A `torch.cuda.Event` is
    one after `record`; host code needs none, because its work is done when it returns."""

    def synchronize(self) -> None:
        """Block this thread until the point is passed."""
        ...

    def wait(self, stream: Any = None) -> None:
        """Make what is launched on this stream from now on wait for it, on the device."""
        ...


def new_room() -> Room:
    """Return a new random room: the bytes of a version 4 UUID. Building a `uuid.UUID` takes longer than drawing
    them."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    return Room(bytes(raw))


def new_incarnation() -> Incarnation:
    """Return a new incarnation for this process; call it once, at start."""
    return Incarnation(int.from_bytes(os.urandom(8)) >> 1 | 1)


def _to_uuid(text: str) -> uuid.UUID:
    """Map any string to a UUID: itself if it is one, else its UUID5."""
    try:
        return uuid.UUID(text)
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_OID, text)


def room_text(room: bytes) -> str:
    """Return a room as logs print it."""
    text = bytes(room).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])) if len(room) == 16 else text


@functools.cache
def instance_name(role: Role, engine_rank: int) -> str:
    """Return the name of an instance: `P0`, `D2`, `U0`, `E1`."""
    return f"{role[0].upper()}{engine_rank}"


def place_text(role: Role, engine_rank: int) -> str:
    """Return role and rank as text, `prefill:2`; `place_of` reads it."""
    return f"{role}:{engine_rank}"


def place_of(text: str) -> tuple[Role, int]:
    """Return the role and rank of a `place_text`. Raises ValueError if it is none."""
    role, _, rank = text.partition(":")
    return Role(role), int(rank)


def waited_text(who: str, waited_s: float, state: Enum, what: str) -> str:
    """Return the text of a deadline's error: `P0 waited 10.0 s in REQUESTED for D1's announcement`."""
    return f"{who} waited {waited_s:.1f} s in {state.name} for {what}"
