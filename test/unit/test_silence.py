"""A router that has gone silent, a step thread that hangs: what an instance does about either."""

from __future__ import annotations

import pytest

from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.errors import Internal
from chitu.instance.comm import SilenceWatch

DEADLINES = DeadlineConfig(heartbeat_interval_s=0.5, router_s=1.5, step_s=2.0)


def test_silence_counts_the_turns_in_which_nothing_came_and_starts_anew_with_every_sign() -> None:
    silence = Silence(0.5)
    assert [silence.seconds(count) for count in (0, 0, 0, 1, 1)] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_each_silence_of_the_router_is_told_once_when_it_is_long_enough() -> None:
    watch = SilenceWatch(DEADLINES)
    views = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [watch.look(count, turn) for turn, count in enumerate(views)] == [0, 0, 0, 1.5, 0, 0, 0, 0, 0, 1.5]


def test_a_cluster_has_ended_after_twenty_such_silences_in_a_row() -> None:
    watch = SilenceWatch(DEADLINES)
    abandoned = []
    for turn in range(62):
        watch.look(1, turn)
        abandoned.append(watch.is_abandoned)
    assert abandoned == [False] * 60 + [True] * 2
    watch.look(2, 62)
    assert not watch.is_abandoned


def test_a_step_that_does_not_end_ends_the_process_and_a_slow_one_does_not() -> None:
    watch = SilenceWatch(DEADLINES)
    for turns, view in enumerate(range(20)):
        watch.look(view, turns // 4)  # each step takes 1.5 s
    with pytest.raises(Internal, match=r"the step thread has stood still for 2.0 s \(deadlines.step_s\)"):
        for view in range(20, 30):
            watch.look(view, 99)
