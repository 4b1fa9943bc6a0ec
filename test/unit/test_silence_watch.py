"""A router that has gone silent, a step thread that hangs: what an instance does about either."""

from __future__ import annotations

import pytest
from scheduler_world import INFO, Instance, prompt_of, room_of
from support.requests import unified_request

from chitu.clock import Silence
from chitu.config.schema import DeadlineConfig
from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.errors import Internal
from chitu.fake.executor import FakeExecutor
from chitu.instance.contacts import SilenceWatch
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import (
    SamplingParams,
    pack_i32,
)

DEADLINES = DeadlineConfig(heartbeat_interval_s=0.5, router_s=1.5, step_s=2.0)


def test_silence_counts_the_turns_in_which_nothing_came_and_starts_anew_with_every_sign() -> None:
    silence = Silence(0.5)
    assert [silence.seconds(count) for count in (0, 0, 0, 1, 1)] == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_each_silence_of_the_router_is_told_once_when_it_is_long_enough() -> None:
    watch = SilenceWatch(DEADLINES)
    views = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [watch.look([count], turn) for turn, count in enumerate(views)] == [
        *([[]] * 3),
        [(0, 1.5)],
        *([[]] * 5),
        [(0, 1.5)],
    ]


def test_a_cluster_has_ended_after_twenty_such_silences_in_a_row() -> None:
    watch = SilenceWatch(DEADLINES)
    abandoned = []
    for turn in range(62):
        watch.look([1], turn)
        abandoned.append(watch.is_abandoned)
    assert abandoned == [False] * 60 + [True] * 2
    watch.look([2], 62)
    assert not watch.is_abandoned


def test_a_step_that_does_not_end_ends_the_process_and_a_slow_one_does_not() -> None:
    watch = SilenceWatch(DEADLINES)
    for turns, view in enumerate(range(20)):
        watch.look([view], turns // 4)  # each step takes 1.5 s
    with pytest.raises(Internal, match=r"the step thread has made no progress for 2.0 s \(deadlines.step_s\)"):
        for view in range(20, 30):
            watch.look([view], 99)


class SlowDevice(FakeExecutor):
    """A device each layer of which takes almost `step_s`."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        def layer_done(layer: int) -> None:
            for _ in range(self.looks):
                self.views += 1
                self.watch.look([self.views], self.scheduler.turns)
            if on_layer is not None:
                on_layer(layer)

        return super().execute(plan, layer_done)

    views = 0
    looks = round(DeadlineConfig().step_s / DeadlineConfig().heartbeat_interval_s) - 1
    watch = SilenceWatch(DeadlineConfig())
    scheduler: PDScheduler


def test_a_step_with_prompt_tokens_may_take_long_while_its_layers_end() -> None:
    assert INFO.num_layers > 1
    instance = Instance(32, executor=SlowDevice)
    device, scheduler = instance.executor, instance.scheduler
    assert isinstance(device, SlowDevice)
    device.scheduler = scheduler
    prompts = [unified_request(room_of(n), "r", pack_i32(prompt_of(n, 4)), SamplingParams(1)) for n in range(2)]
    scheduler.submit(prompts[0])
    assert scheduler.step()
    assert device.views == INFO.num_layers * device.looks
    device.looks += 2
    scheduler.submit(prompts[1])
    with pytest.raises(Internal, match=r"the step thread has made no progress for .*step_s"):
        scheduler.step()
