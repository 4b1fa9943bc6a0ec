"""The vision tower in turns: steps of others between them, ends in the middle, and what raises. No port, no sleep."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_world import SEEING, Seeing, SeeingPair, text
from scheduler_world import room_of
from support.images import image, key_of

from chitu.engine.executor import LayerCallback, StepPlan, StepResult, TowerCost, TowerTurn
from chitu.errors import Internal, StepFailed
from chitu.instance.images import ImageGate, PromptImages, StoredImage
from chitu.instance.tower_batch import TowerBatch
from chitu.protocol import CancelRequest

BLOCKS = 6
TURNING = msgspec.structs.replace(SEEING, tower=TowerCost(BLOCKS, row=1.0, square=0.0), image_rows=40)
"""A block costs a token for each row: with chunks of 5, an image of 6 rows has a turn for each block."""
PROMPT = text(0, 30)
IMAGES = (image(1, 6, 6, side=2), image(2, 14, 7))
"""A batch of 13 rows."""


def turning(**options: Any) -> Seeing:
    return Seeing(info=options.pop("info", TURNING), **options)


def begin(instance: Seeing, index: int = 0, images: Any = IMAGES, most: int = 20) -> None:
    """Submit a prompt, and run until the tower computes its images."""
    instance.submit(index, PROMPT, images)
    for _ in range(most):
        instance.step()
        if instance.executor.tower:
            return
    raise AssertionError("nothing is encoded")


@pytest.mark.parametrize(
    ("count", "most_tokens", "turns"),
    [
        (10, 60, []),  # in one step
        (10, 59, [5, 1]),
        (10, 20, [2, 2, 2]),
        (10, 25, [2, 2, 2]),
        (10, 9, [1] * 6),
        (10, 0, [1] * 6),
        (1, 4, [4, 2]),
    ],
)
def test_a_turn_costs_as_much_as_a_chunk(count: int, most_tokens: int, turns: list[int]) -> None:
    batch, found, at = TowerBatch(TURNING.tower), list[int](), 0
    batch.images.append(StoredImage(key_of(1), np.arange(count, dtype=np.int32)))
    while not batch.is_complete:
        for turn in batch.turns(most_tokens):
            assert turn.of == BLOCKS
            found.append(turn.blocks - at)
            at = turn.blocks
            assert batch.is_complete == turn.is_last
    assert found == turns


def test_pairs_of_rows_cost_within_an_image_alone() -> None:
    cost = TowerCost(1, row=2.0, square=0.5)
    assert cost.tokens([10]) == 20 + 50 and cost.tokens([10, 4]) == 70 + 8 + 8


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_one_piece(chunk: int, overlap: bool) -> None:
    instance = turning(chunk=chunk, overlap=overlap)
    instance.submit(0, PROMPT, IMAGES)
    instance.submit(1, text(0, 20))
    instance.submit(2, PROMPT, [image(3, 0, 6, spans=2), image(4, 28, 2)])
    instance.submit(3, PROMPT, [image(1, 3, 6)])
    instance.run()
    instance.check(0, PROMPT, IMAGES)
    instance.check(1, text(0, 20), [])
    instance.check(2, PROMPT, [image(3, 0, 6, spans=2), image(4, 28, 2)])
    instance.check(3, PROMPT, [image(1, 3, 6)])
    assert sorted(instance.executor.encoded) == [key_of(name) for name in (1, 2, 3, 4)]
    assert sum(instance.executor.turns) % BLOCKS == 0 and len(instance.executor.turns) >= 2
    assert instance.scheduler.load.images == 4 and not instance.executor.dropped
    instance.check_empty()


def test_decodes_and_chunks_of_others_go_on_in_each_step_with_a_turn() -> None:
    instance = turning(chunk=3)
    instance.submit(0, text(1, 5), max_tokens=60)
    for _ in range(4):
        instance.step()
    begin(instance, 1)
    instance.submit(2, text(2, 40))
    emitted, computed = len(instance.tokens[room_of(0)]), 0
    for turn in range(1, BLOCKS):
        instance.step()
        assert len(instance.executor.turns) == turn + 1
        assert len(instance.tokens[room_of(0)]) == emitted + turn, "a stream waits for the tower"
        other, seeing = (instance.scheduler._sequences.get(room_of(index)) for index in (2, 1))
        assert other is not None and seeing is not None
        assert other.kv_len > computed, "another prompt waits for the tower"
        computed = other.kv_len
        assert seeing.kv_len <= 6 or turn == BLOCKS - 1, "rows of the image were computed before its features"
    instance.run()
    instance.check(0, text(1, 5), [], 60)
    instance.check(1, PROMPT, IMAGES)
    instance.check(2, text(2, 40), [])
    assert instance.executor.turns == [1] * BLOCKS, "several images are one batch"
    instance.check_empty()


def test_p_computes_texts_between_turns() -> None:
    pair = SeeingPair(info=TURNING, chunk=3)
    pair.submit(0, PROMPT, IMAGES)
    while not pair.prefill.executor.tower:
        pair.turn()
    pair.submit(1, text(4, 6))
    while room_of(1) not in pair.decode.tokens:
        pair.turn()
    assert pair.prefill.executor.tower, "the text waits for the tower"
    assert pair.prefill.scheduler._role._num_advances >= len(pair.prefill.executor.turns), "a turn is a sign of life"
    pair.run()
    pair.decode.check(0, PROMPT, IMAGES)
    pair.decode.check(1, text(4, 6), [])
    for instance in (pair.prefill, pair.decode):
        instance.check_empty()


def test_the_tower_stops_at_the_next_block_if_nobody_waits_for_its_images() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.step()
    instance.scheduler.submit(CancelRequest(room_of(0)))
    instance.step()
    assert instance.executor.dropped == [[key_of(1), key_of(2)]] and len(instance.executor.turns) == 2
    assert instance.gate.store.num_pinned == 0 and not instance.executor.encoded
    instance.check_empty()
    assert instance.ask(1, PROMPT, IMAGES) == 4, "the text before them was cached"
    assert instance.executor.encoded == [key_of(1), key_of(2)]
    instance.check_empty()


def test_it_goes_on_for_another_prompt_with_one_of_them() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.submit(1, text(1, 30), [image(2, 3, 7)])
    instance.step()
    instance.scheduler.submit(CancelRequest(room_of(0)))
    instance.run()
    instance.check(1, text(1, 30), [image(2, 3, 7)])
    assert instance.executor.encoded == [key_of(1), key_of(2)] and not instance.executor.dropped
    instance.check_empty()


def test_a_flush_in_the_middle_leaves_nothing_of_the_images() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.scheduler.flush_cache()
    instance.run()
    instance.check(0, PROMPT, IMAGES)
    assert instance.ask(1, PROMPT, IMAGES) == 0
    assert instance.executor.encoded == [key_of(1), key_of(2)] * 2
    instance.check_empty()


def test_a_mixed_change_of_weights_in_the_middle_begins_anew() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.change_weights(1, 1)
    instance.run()
    assert instance.executor.weights == 1 and instance.executor.encoded == [key_of(1), key_of(2)]
    instance.check_empty()


def test_an_image_that_raises_fails_its_request_alone() -> None:
    instance = turning(chunk=3)
    instance.submit(0, text(1, 5), max_tokens=40)
    instance.executor.bad_patches.add(key_of(1))
    instance.submit(1, PROMPT, [IMAGES[0]])
    instance.submit(2, PROMPT, [IMAGES[1]])
    instance.run()
    assert instance.finishes[room_of(1)].code == StepFailed.code
    instance.check(0, text(1, 5), [], 40)
    instance.check(2, PROMPT, [IMAGES[1]])
    assert instance.executor.turns and not instance.gate.store.find(key_of(1))
    instance.check_empty()


def test_another_request_that_raises_between_turns_takes_no_image_with_it() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.submit(1, text(3, 20))
    execute = instance.executor.execute

    def failing(plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        sequence = instance.scheduler._sequences.get(room_of(1))
        if sequence is not None and any(chunk.slot == sequence.slot and chunk.length > 1 for chunk in plan.prefill):
            raise ValueError("always")
        return execute(plan, on_layer)

    instance.executor.execute = failing  # type: ignore[method-assign]
    instance.run()
    assert instance.finishes[room_of(1)].code == StepFailed.code
    instance.check(0, PROMPT, IMAGES)
    assert sorted(instance.executor.encoded) == [key_of(1), key_of(2)]
    instance.check_empty()


def test_a_second_batch_waits_for_the_first() -> None:
    instance = turning(chunk=3)
    begin(instance)
    instance.submit(1, text(1, 30), [image(5, 2, 9)])
    while instance.executor.tower:
        assert len(instance.executor.tower) == 2
        instance.step()
    assert instance.executor.encoded == [key_of(1), key_of(2)]
    instance.run()
    instance.check(1, text(1, 30), [image(5, 2, 9)])
    instance.check_empty()


# ------------------------------------------------------------------------------------------------------ planted faults


def _ready_at_once(gate: ImageGate, batch: TowerBatch, plan: StepPlan, most_tokens: int) -> None:
    plan.turn.extend(batch.turns(most_tokens))


def _skipping(batch: TowerBatch, most_tokens: int) -> list[TowerTurn]:
    batch.blocks += BLOCKS // 3
    batch.is_complete = batch.blocks >= BLOCKS
    return [TowerTurn(batch.blocks, BLOCKS)] if not batch.is_complete else []


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "rows are read before the last turn": (ImageGate, "_take_turn", _ready_at_once),
    "chunks go on into an image that is not ready": (PromptImages, "next_unready", PromptImages.next_missing),
    "the last turn is missing": (TowerBatch, "turns", _skipping),
    "the tower is not told to stop": (ImageGate, "end_plan", lambda gate, plan: None),
}


@pytest.mark.parametrize("fault", [*PLANTED, None])
def test_planted_faults_change_tokens_or_break_a_plan(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        owner, name, wrong = PLANTED[fault]
        monkeypatch.setattr(owner, name, wrong)

    def serve() -> None:
        instance = turning(chunk=3)
        begin(instance)
        instance.submit(1, PROMPT, [image(3, 6, 6)])
        instance.run()
        instance.check(0, PROMPT, IMAGES)
        instance.check(1, PROMPT, [image(3, 6, 6)])
        begin(instance, 2, [image(4, 6, 9)])
        instance.scheduler.submit(CancelRequest(room_of(2)))
        instance.run()
        assert not instance.executor.tower

    if fault is None:
        serve()
        return
    with pytest.raises((AssertionError, Internal)):
        serve()


# ----------------------------------------------------------------------------------------------------- random loads


loads = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4), st.integers(-2, 2), st.booleans()),
    min_size=1,
    max_size=7,
)
"""Images (name and text before it), priority, and whether it is cancelled at some time."""
SIZES = [1, 3, 4, 6, 9, 12]
"""Rows of each image by its name."""


@given(loads, st.integers(12, 30), st.integers(0, 1 << 30), st.booleans(), st.booleans(), st.integers(1, 9))
def test_every_prompt_ends_whatever_comes_between_turns(
    load: list[tuple[list[tuple[int, int]], int, bool]],
    num_rows: int,
    seed: int,
    is_whole: bool,
    overlap: bool,
    chunk: int,
) -> None:
    rng = random.Random(seed)
    cost = TowerCost(rng.choice((2, 5)), rng.choice((0.3, 1.0)), rng.choice((0.0, 0.2)))
    info = msgspec.structs.replace(SEEING, image_rows=num_rows, whole_images=is_whole, tower=cost)
    instance = Seeing(40, info, most=rng.choice((13, 16)), overlap=overlap, chunk=chunk)
    instance.is_slow = True
    made = []
    for parts, _, _ in load:
        at, images = 0, []
        for name, gap in parts:
            images.append(image(name, at + gap, SIZES[name], spans=1 + (name == 3), side=1 + name % 2))
            at = images[-1].end
        made.append((text(0, max(20, at + 1)), images))
    pending, cancelled, bad = list(range(len(load))), set[int](), rng.choice((None, 0, 3)) if not overlap else None
    if bad is not None:
        instance.executor.bad_patches.add(key_of(bad))
    for _ in range(5000):
        if pending and rng.random() < 0.4:
            index = pending.pop(0)
            instance.submit(index, *made[index], priority=load[index][1])
        if instance.source.open and rng.random() < 0.5:
            instance.source.prepare(rng.choice(sorted(instance.source.open)))
        for index, (_, _, is_cancelled) in enumerate(load):
            if is_cancelled and index not in pending and rng.random() < 0.05:
                cancelled.add(index)
                instance.scheduler.submit(CancelRequest(room_of(index)))
        if rng.random() < 0.02:
            instance.scheduler.flush_cache()
        instance.step()
        if not pending and instance.scheduler.is_idle:
            break
    else:
        raise AssertionError(f"still busy: {instance.scheduler.load}")
    instance.step()
    for index in set(range(len(load))) - cancelled:
        if any(part.key == key_of(bad) for part in made[index][1]) if bad is not None else False:
            assert instance.finishes[room_of(index)].code == StepFailed.code
        else:
            instance.check(index, *made[index])
    assert not instance.executor.tower
    instance.check_empty()
