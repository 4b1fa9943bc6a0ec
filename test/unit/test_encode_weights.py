"""Weights that change while E encode: no feature of old ones is computed with, whoever is late or says otherwise."""

from __future__ import annotations

import logging

import pytest
from encode_world import EncodeWorld
from support.images import image
from test_image_pulls import IMAGES, KEYS, PROMPT, ask, encoded

from chitu.engine.weights_loader import ReadWeights
from chitu.instance.image_pulls import ImagePulls


def change(world: EncodeWorld, number: int, p: bool = True, e: bool = True) -> None:
    """Change the weights of P, of E, or of all, and let all see it."""
    if p:
        world.p.change_weights(number, number)
        world.p.step()
    if e:
        for each in world.encoders:
            each.change_weights(number)
    world.show()


def test_all_change_and_e_encodes_every_image_anew() -> None:
    world = EncodeWorld(2)
    ask(world, 0)
    change(world, 1)
    ask(world, 1)
    assert encoded(world) == sorted([*KEYS, *KEYS]) and not world.p.executor.encoded
    assert {each.tower.weights for each in world.encoders} == {world.p.executor.weights} == {1}
    ask(world, 2)
    assert world.pulls.num_filled == 6, "they are here"
    world.check_empty()


@pytest.mark.parametrize("late", ["E", "P"])
def test_an_e_with_other_weights_than_p_is_not_asked_until_both_have_the_same(late: str) -> None:
    world = EncodeWorld(2)
    ask(world, 0)
    change(world, 1, p=late == "E", e=late == "P")
    world.p.gate.store.drop_all()
    ask(world, 1)
    assert sorted(world.p.executor.encoded) == sorted(KEYS) and encoded(world) == sorted(KEYS)
    change(world, 1, p=late == "P", e=late == "E")
    world.p.gate.store.drop_all()
    ask(world, 2)
    assert encoded(world) == sorted([*KEYS, *KEYS]) and not world.pulls.num_failed
    world.check_empty()


@pytest.mark.parametrize("turns", range(1, 9))
def test_what_is_under_way_at_the_change_is_given_up_and_asked_for_anew(turns: int) -> None:
    world = EncodeWorld(2)
    world.p.submit(0, PROMPT, IMAGES)
    for _ in range(turns):
        world.turn()
    change(world, 1)
    world.run(step_s=0.05)
    assert world.p.executor.weights == 1 and len(world.p.tokens) == 1
    ask(world, 1)
    world.check_empty()


def stays_old(world: EncodeWorld) -> None:
    """Have the towers keep their numbers while the processes say that they changed."""
    for each in world.encoders:
        each.scheduler.weights._loader.change = lambda: None  # type: ignore[method-assign]


def keeps_features(world: EncodeWorld) -> None:
    """Have what the towers made before stay in the cache."""
    for each in world.encoders:
        each.store.drop_all = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [stays_old, keeps_features])
@pytest.mark.parametrize("is_checked", [True, False])
def test_features_of_old_weights_are_found_by_their_mark(
    plant: object, is_checked: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check the fault shows in what the prompt gives."""
    assert callable(plant)
    world = EncodeWorld(2)
    plant(world)
    ask(world, 0)
    change(world, 1)
    if not is_checked:
        monkeypatch.setattr(ImagePulls, "_why_others", lambda pulls, pull: None)
        with pytest.raises(AssertionError):
            ask(world, 1)
        return
    with caplog.at_level(logging.WARNING):
        ask(world, 1)
    assert "(weights_changed)" in caplog.text and "its features are of other weights" in caplog.text
    assert sorted(world.p.executor.encoded) == sorted(KEYS) and world.pulls.num_filled == 3
    world.check_empty()


def test_a_folder_that_e_cannot_read_is_reported_and_its_weights_stay() -> None:
    world = EncodeWorld(1)
    keeper = world.encoders[0].scheduler.weights
    keeper._loader.poll = lambda: ReadWeights(error="no such folder")  # type: ignore[method-assign]
    world.encoders[0].change_weights(1)
    assert keeper.report.error == "no such folder" and keeper.serves.number == 0
    ask(world, 0, (image(1, 6, 6, side=2),))
    assert encoded(world) == KEYS[:1]
