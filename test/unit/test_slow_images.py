"""Images on a machine ten times slower, in virtual time: who computes has time, who is silent is left at once."""

from __future__ import annotations

import pytest
from encode_world import DEADLINES, LAYOUT, EncodeWorld, ToyEncoder
from image_world import Seeing, text
from scheduler_world import room_of
from support.clock import FakeClock
from support.images import image

from chitu.config.schema import DeadlineConfig
from chitu.images.child import TASK_CPU_S, task_cpu_s
from chitu.instance.image_pulls import ATTEMPT_SHARE
from chitu.kv_transfer.both_sides import KVManagerConfig
from chitu.kv_transfer.pulling import feature_config

PROMPT = text(0, 30)
LARGE, OTHER = image(1, 6, 6, side=2), image(2, 14, 7)
SLOWER = 10
BLOCK_S, NUM_BLOCKS = SLOWER * 0.1, 24
"""A large image takes an E longer than an attempt lasts without a sign, several times."""
PREPARE_S, LOAD_S = SLOWER * 2.0, SLOWER * 1.0
"""What patches of an image of 4K take, and loading the processor."""
SIGN_S = 1.0
"""How often the image process is looked at."""
REPORT_S = min(DEADLINES.bootstrap_s, DEADLINES.transfer_s) / 10
"""How often an E reports that it advances."""
ATTEMPT_S = ATTEMPT_SHARE * min(DEADLINES.bootstrap_s, DEADLINES.transfer_s)


def slow_world(num_encoders: int = 2) -> tuple[EncodeWorld, ToyEncoder]:
    """Return a world, and the E that P prefers for the large image. Its tower takes virtual time, in which all but its
    step thread go on."""
    world = EncodeWorld(num_encoders)
    chosen = world.pulls.choose(LARGE.key, LARGE.num_rows)
    assert chosen is not None
    slow = world.encoders[chosen.engine_rank]
    slow.tower.num_blocks, slow.tower.on_block = NUM_BLOCKS, lambda: pass_block(world, slow)
    return world, slow


def pass_block(world: EncodeWorld, slow: ToyEncoder) -> None:
    pass_time(world, BLOCK_S)
    slow.scheduler.note_block()


def pass_time(world: EncodeWorld, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        world.clock.advance(0.1)
        world.turn()


def test_an_e_that_computes_a_large_image_is_waited_for() -> None:
    world, slow = slow_world()
    began_s = world.clock.monotonic()
    world.p.submit(0, PROMPT, (LARGE,))
    world.run(step_s=0.1)
    world.p.check(0, PROMPT, (LARGE,))
    assert world.clock.monotonic() - began_s > 3 * ATTEMPT_S
    assert slow.tower.encoded == [LARGE.key] and not world.encoders[1 - slow.rank].tower.encoded
    assert not world.pulls.num_failed and not world.p.executor.encoded
    world.check_empty()


def test_an_order_that_comes_while_an_e_computes_is_waited_for() -> None:
    """The step thread of that E is in a step of another image for longer than an attempt lasts without a sign."""
    world, slow = slow_world(num_encoders=1)
    has_come = False

    def next_block() -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            world.p.submit(1, text(1, 30), (OTHER,))
        pass_block(world, slow)

    slow.tower.on_block = next_block
    world.p.submit(0, PROMPT, (LARGE,))
    world.run(step_s=0.1)
    world.p.check(0, PROMPT, (LARGE,))
    world.p.check(1, text(1, 30), (OTHER,))
    assert slow.tower.encoded == [LARGE.key, OTHER.key]
    assert not world.pulls.num_failed and not world.p.executor.encoded
    world.check_empty()


def test_an_e_that_prepares_a_large_image_is_waited_for() -> None:
    world, slow = slow_world()
    slow.is_slow = True
    world.p.submit(0, PROMPT, (LARGE,))
    for _ in range(round((PREPARE_S + LOAD_S) / SIGN_S)):
        pass_time(world, SIGN_S)
        slow.source.num_signs += 1
    slow.is_slow = False
    world.run(step_s=0.1)
    world.p.check(0, PROMPT, (LARGE,))
    assert not world.pulls.num_failed and not world.p.executor.encoded
    world.check_empty()


@pytest.mark.parametrize("does_begin", [False, True])
def test_an_e_that_is_silent_is_left_as_soon_as_ever(does_begin: bool) -> None:
    """Also one that advanced and then stops, whose last report comes up to `REPORT_S` late."""
    world, slow = slow_world()
    slow.is_slow = True
    world.p.submit(0, PROMPT, (LARGE,))
    for _ in range(8 if does_begin else 0):
        pass_time(world, SIGN_S)
        slow.source.num_signs += 1
    pass_time(world, 0.3)
    assert not world.pulls.num_failed
    silent_s = world.clock.monotonic()
    while not world.pulls.num_failed:
        pass_time(world, 0.1)
    found_s = world.clock.monotonic() - silent_s
    assert ATTEMPT_S - 0.5 < found_s < ATTEMPT_S + 0.3 + (REPORT_S if does_begin else 0)
    world.run(step_s=0.1, lends=True)
    world.p.check(0, PROMPT, (LARGE,))
    assert world.encoders[1 - slow.rank].tower.encoded == [LARGE.key]
    slow.is_slow = False
    world.run(step_s=0.1)
    world.check_empty()


def test_planted_who_ignores_that_an_e_advances_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = slow_world()
    monkeypatch.setattr(world.receiver, "num_advances", lambda room: 0)
    with pytest.raises(AssertionError):
        world.p.submit(0, PROMPT, (LARGE,))
        world.run(step_s=0.1, lends=True)
        assert not world.pulls.num_failed


@pytest.mark.parametrize("work_s", [0.0, PREPARE_S + LOAD_S, 3 * DEADLINES.transfer_s])
def test_an_image_process_that_computes_has_time_and_one_that_stops_has_not(work_s: float) -> None:
    p = Seeing(clock=(clock := FakeClock()))
    p.is_slow = True
    p.submit(0, PROMPT, (LARGE,))
    p.step()
    advances = p.gate.num_advances
    for _ in range(round(work_s / SIGN_S)):
        clock.advance(SIGN_S)
        p.source.num_signs += 1
        p.step()
        assert room_of(0) not in p.finishes
    assert p.gate.num_advances == advances + round(work_s / SIGN_S), "D is told"
    clock.advance(DEADLINES.transfer_s - 0.1)
    p.step()
    assert room_of(0) not in p.finishes
    if work_s == PREPARE_S + LOAD_S:
        p.is_slow = False
        p.run()
        p.check(0, PROMPT, (LARGE,))
    else:
        clock.advance(0.2)
        p.step()
        assert p.finishes[room_of(0)].code == "transfer_stalled"
    p.check_empty()


def test_an_e_reports_several_times_within_the_silence_that_p_bears() -> None:
    deadlines = DeadlineConfig(bootstrap_s=1.0)
    p = KVManagerConfig(0, 1, "127.0.0.1", 1, LAYOUT, deadlines)
    e = feature_config(p, LAYOUT, 2)
    assert p.progress_interval_s == deadlines.transfer_s / 10
    assert e.progress_interval_s * 4 < ATTEMPT_SHARE * deadlines.bootstrap_s


def test_a_task_has_the_cpu_time_that_the_machine_needs() -> None:
    assert task_cpu_s(TASK_CPU_S, 0.5) == task_cpu_s(TASK_CPU_S, 1.0) == TASK_CPU_S
    assert task_cpu_s(TASK_CPU_S, SLOWER) == task_cpu_s(TASK_CPU_S, 1000.0) == SLOWER * TASK_CPU_S
