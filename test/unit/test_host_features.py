"""Features of images in host memory: what gave way is loaded, not encoded; bounded, and of the present weights."""

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

from chitu.engine.executor import LayerCallback, StepPlan, StepResult, TowerCost
from chitu.errors import DamagedFeatures, Internal, StepFailed
from chitu.instance.host_features import HostFeatures
from chitu.instance.images import FeatureStore, ImageGate
from chitu.protocol import CancelRequest

SMALL = msgspec.structs.replace(SEEING, image_rows=8)
"""A region for one of the images below."""
FIRST, SECOND, THIRD = (image(name, 3, 6) for name in (1, 2, 3))


def kept(host: int = 12, **options: Any) -> Seeing:
    return Seeing(info=options.pop("info", SMALL), host=host, **options)


def ask_each(instance: Seeing, *images: Any) -> None:
    """Serve a prompt for each image, behind a text that no other prompt has: nothing of it is cached."""
    for each in images:
        index = instance.scheduler._load.admissions + 1
        instance.ask(index, text(index, 30), [each])


def test_an_image_that_gave_way_is_loaded_and_not_encoded() -> None:
    instance = kept()
    ask_each(instance, FIRST, SECOND, FIRST, SECOND)
    assert instance.executor.encoded == [key_of(1), key_of(2)], "in host memory, both"
    assert len(instance.executor.loaded) == 2 and len(instance.source.asked) == 2
    instance.check_empty()


def test_without_host_memory_it_is_encoded_again() -> None:
    instance = kept(0)
    ask_each(instance, FIRST, SECOND, FIRST)
    assert instance.executor.encoded == [key_of(1), key_of(2), key_of(1)] and not instance.executor.copies


def test_copies_are_bounded_and_the_least_recently_used_gives_way() -> None:
    instance = kept(host=12)
    ask_each(instance, FIRST, SECOND, THIRD, FIRST)  # the third gives way to the first, and the second to the third
    assert instance.executor.encoded == [key_of(1), key_of(2), key_of(3)]
    ask_each(instance, THIRD, SECOND)
    assert instance.executor.encoded == [key_of(1), key_of(2), key_of(3), key_of(2)]
    assert instance.executor.most_copied == 12 and len(instance.executor.copies) == 2
    instance.check_empty()


def test_an_image_larger_than_the_host_memory_is_not_copied() -> None:
    instance = kept(host=5)
    ask_each(instance, FIRST, SECOND, FIRST)
    assert not instance.executor.copies and len(instance.executor.encoded) == 3


@pytest.mark.parametrize("change", ["flush", "weights"])
def test_a_flush_and_other_weights_drop_the_copies(change: str) -> None:
    instance = kept()
    ask_each(instance, FIRST, SECOND)
    assert len(instance.executor.copies) == 1
    if change == "flush":
        instance.scheduler.flush_cache()
    else:
        instance.change_weights(1, 1)
    instance.run()
    ask_each(instance, FIRST)
    assert instance.executor.encoded == [key_of(1), key_of(2), key_of(1)] and not instance.executor.loaded
    assert not instance.executor.copies
    instance.check_empty()


def test_a_damaged_copy_ends_its_request_alone_and_is_read_no_more() -> None:
    instance = kept()
    ask_each(instance, FIRST, SECOND)
    [number] = instance.executor.copies
    instance.executor.damaged.add(number)
    instance.submit(10, text(10, 30), [FIRST])
    instance.submit(11, text(11, 20))
    instance.run()
    assert instance.finishes[room_of(10)].code == StepFailed.code
    instance.check(11, text(11, 20), [])
    ask_each(instance, FIRST)
    assert instance.executor.encoded == [key_of(1), key_of(2), key_of(1)]
    assert number not in instance.executor.copies
    instance.check_empty()


def test_a_step_that_raises_elsewhere_loads_again() -> None:
    instance = kept(chunk=3)
    ask_each(instance, FIRST, SECOND)
    instance.submit(10, text(10, 30), [FIRST])
    instance.submit(11, text(11, 20))
    execute = instance.executor.execute

    def failing(plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if plan.load_images:
            instance.executor.execute = execute  # type: ignore[method-assign]
            raise ValueError("once, before anything is done")
        return execute(plan, on_layer)

    instance.executor.execute = failing  # type: ignore[method-assign]
    instance.run()
    instance.check(10, text(10, 30), [FIRST])
    instance.check(11, text(11, 20), [])
    ask_each(instance, SECOND, FIRST)
    instance.check_empty()


def test_p_loads_what_d_never_sees() -> None:
    pair = SeeingPair(info=SMALL, host=12)
    for index, each in enumerate((FIRST, SECOND, FIRST)):
        pair.ask(index, text(index, 30), [each])
    assert pair.prefill.executor.encoded == [key_of(1), key_of(2)] and len(pair.prefill.executor.loaded) == 1
    assert not pair.decode.executor.copies


def test_a_plan_drops_nothing_that_it_loads() -> None:
    host, plan = HostFeatures(6), StepPlan()
    host.save(key_of(1), np.arange(6, dtype=np.int32), plan)
    host.begin_plan()
    assert host.hold(key_of(1)) and not host.hold(key_of(2))
    host.load(key_of(1), np.arange(6, dtype=np.int32), plan)
    host.save(key_of(2), np.arange(4, dtype=np.int32), plan)
    host.end_plan(plan)
    assert key_of(1) in host and key_of(2) not in host and not plan.drop_images and host.num_used == 6
    host.begin_plan()
    host.save(key_of(2), np.arange(4, dtype=np.int32), plan)
    host.end_plan(plan)
    assert plan.drop_images == [1] and host.num_used == 4


# ------------------------------------------------------------------------------------------------------ planted faults


def _keep_all(store: FeatureStore) -> None:
    for each in list(store._images.values()):
        store.discard(each)


def _save_late(host: HostFeatures, key: bytes, rows: Any, plan: StepPlan, right: Any = HostFeatures.save) -> None:
    right(host, key, (rows + 1) % SMALL.image_rows, plan)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "copies of other weights stay": (FeatureStore, "drop_all", _keep_all),
    "other rows are saved": (HostFeatures, "save", _save_late),
    "what was dropped is not told": (HostFeatures, "end_plan", lambda host, plan: None),
    "a load is missing": (HostFeatures, "load", lambda host, key, rows, plan: None),
}


@pytest.mark.parametrize("fault", [*PLANTED, None])
def test_planted_faults_change_tokens_or_the_bound(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        owner, name, wrong = PLANTED[fault]
        monkeypatch.setattr(owner, name, wrong)

    def serve() -> None:
        instance = kept()
        ask_each(instance, FIRST, SECOND, THIRD, FIRST)
        instance.change_weights(1, 1)
        instance.run()
        for index, each in ((20, THIRD), (21, FIRST), (22, SECOND), (23, THIRD)):
            instance.submit(index, text(index, 30), [each], weights=1)
            instance.run()
            instance.check(index, text(index, 30), [each])
        assert instance.executor.most_copied <= 12
        instance.check_empty()

    if fault is None:
        serve()
        return
    with pytest.raises((AssertionError, Internal)):
        serve()


# ----------------------------------------------------------------------------------------------------- random loads


SIZES = [1, 3, 4, 6, 9, 12]
"""Rows of each image by its name."""
loads = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4), st.integers(-2, 2), st.booleans()),
    min_size=1,
    max_size=8,
)
"""Images (name and text before it), priority, and whether it is cancelled at some time."""


@given(loads, st.integers(12, 16), st.integers(1, 24), st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_every_prompt_has_its_own_features_whatever_is_copied_when(
    load: list[tuple[list[tuple[int, int]], int, bool]],
    num_rows: int,
    host: int,
    seed: int,
    overlap: bool,
    turns: bool,
) -> None:
    rng = random.Random(seed)
    tower = TowerCost(3, 1.0, 0.0) if turns else None
    info = msgspec.structs.replace(SEEING, image_rows=num_rows, tower=tower)
    instance = Seeing(60, info, host=host, overlap=overlap, chunk=rng.choice((2, 5, 16)))
    made = []
    for index, (parts, _, _) in enumerate(load):
        at, images = 0, []
        for name, gap in parts:
            images.append(image(name, at + gap, SIZES[name], spans=1 + (name == 3), side=1 + name % 2))
            at = images[-1].end
        made.append((text(index, max(20, at + 1)), images))
    pending, cancelled = list(range(len(load))), set[int]()
    for _ in range(5000):
        if pending and rng.random() < 0.3:
            index = pending.pop(0)
            instance.submit(index, *made[index], priority=load[index][1])
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
        instance.check(index, *made[index])
    assert instance.executor.most_copied <= host
    assert isinstance(instance.gate, ImageGate) and issubclass(DamagedFeatures, StepFailed)
    instance.check_empty()
