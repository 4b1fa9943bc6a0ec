"""What a look at a machine brought up: a line for an operator. Pure values, made by the checks of `preflight.py` and
`doctor_checks.py`."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and not as it could."""
    ERROR = "error"
    """The topology cannot serve like this."""


class Finding(msgspec.Struct, frozen=True):
    level: Level
    what: str
    """A word or two: `port 21003`, `torch`."""
    says: str
    cure: str = ""
    """What to do; empty where nothing has to be done."""

    @property
    def sentence(self) -> str:
        return f"{self.says}; {self.cure}" if self.cure else self.says
