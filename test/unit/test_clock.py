"""Time as values."""

from __future__ import annotations

from chitu.clock import Silence


def test_silence_counts_the_turns_in_which_nothing_came_and_starts_anew_with_every_sign() -> None:
    silence = Silence(0.5)
    assert [silence.seconds(count) for count in (0, 0, 0, 1, 1)] == [0.0, 0.5, 1.0, 0.0, 0.5]
