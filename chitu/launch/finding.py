"""Findings of the checks of a machine, each a line for an operator. Pure values, made by `preflight.py` and
`doctor_checks.py`."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The topology can serve, but not as well as it could."""
    ERROR = "error"
    """The topology cannot serve like this."""


class Finding(msgspec.Struct, frozen=True):
    level: Level
    what: str
    """Subject in a word or two: `port 21003`, `torch`."""
    says: str
    cure: str = ""
    """What to do; empty if nothing."""

    @property
    def sentence(self) -> str:
        return f"{self.says}; {self.cure}" if self.cure else self.says
