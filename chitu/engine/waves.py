"""Waves: when the members of a group that share experts step together. One member's view of them, without threads,
sockets or torch.

A *wave* begins when a member has rows while all sleep, and ends with the first turn in which none has any. In a turn
every member says what it computes and learns what the others do, so all see the same and end the wave together. Waves
are numbered from 0, equally on all members. A member that begins a wave rings the *bells* of the others with its number
until all have come. Bells may be lost, doubled and late: one for a wave that is over says nothing, and one for the next
wave may come before this member has seen the end of the present one.

The thread that listens calls `hear`, the step thread everything else.
"""

from __future__ import annotations

from hashlib import blake2b

NO_OFFER = 0
"""What a member says that may not change its weights."""


class Wave:
    def __init__(self) -> None:
        self.number = 0
        """Of the present wave, or if none is on, of the next one."""
        self.is_on = False
        """Whether this member has had a turn in it."""
        self._rung = -1
        """Latest wave for which the bell was rung."""

    @property
    def must_turn(self) -> bool:
        """Whether the others wait for this member, with or without rows of its own."""
        return self.is_on or self._rung >= self.number

    def enter(self) -> bool:
        """Begin a turn. Return whether this member has to ring the bells of the others."""
        rings = not self.must_turn
        self.is_on = True
        return rings

    def end_turn(self, has_rows: bool) -> None:
        """End a turn. `has_rows`: whether any member had rows in it."""
        if not has_rows:
            self.is_on = False
            self.number += 1

    def hear(self, number: int) -> None:
        """Take a bell. No member can be further than one wave ahead."""
        if self._rung < number <= self.number + 1:
            self._rung = number


def offer_of(age: tuple[int, str, str]) -> int:
    """Return a number for weights (`Weights.age`) that is equal on all members."""
    return int.from_bytes(blake2b(repr(age).encode(), digest_size=7).digest(), "little") | 1
