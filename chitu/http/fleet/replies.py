"""Answers of the routes that show and change the cluster. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec


class HealthInstance(msgspec.Struct):
    name: str
    role: Literal["prefill", "decode", "unified", "encode"]
    incarnation: int
    draining: bool
    home: str = ""
    """Name with which its process was started, if it has changed its role since."""
    asleep: bool = False
    """Whether it has given memory back, and serves once it wakes."""


class HealthReply(msgspec.Struct):
    status: Literal["ok", "unavailable", "ending"]
    reason: str
    """Empty if the status is ok."""
    in_flight: int
    instances: list[HealthInstance]
    ready: dict[str, bool]
    """Whether an instance of the role can be used, by role."""


class StatusReply(msgspec.Struct):
    status: str


class ExampleReply(msgspec.Struct):
    prompt: str
    answer: str
    value: str
