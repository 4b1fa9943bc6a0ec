"""Prompts with images on P, D and unified instances: gate, features, page keys, faults, ends. No port, no sleep."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import tiered_world
from hypothesis import given
from hypothesis import strategies as st
from image_world import SEEING, Eyes, Seeing, SeeingPair, SeeingSide, full_pages, text
from numpy.typing import NDArray
from scheduler_world import INFO, PAGE_SIZE, room_of
from support.clock import FakeClock
from support.images import PumpedSource, VisionExecutor, expected_with_images, image, key_of
from support.requests import prefill_request, unified_request
from tiered_world import Engine, Tiered

from chitu.engine.executor import ExecutorInfo, LayerCallback, StepPlan, StepResult
from chitu.errors import Capacity, DecodeLost, Internal, InvalidRequest, StepFailed, TransferStalled
from chitu.instance.image_source import NoImages
from chitu.instance.images import FeatureStore, PromptImages, StoredImage
from chitu.kv_cache import prefix_index
from chitu.protocol import CancelRequest, Fork, ImagePart, SamplingParams, pack_i32

PROMPT = text(0, 30)
IMAGES = (image(1, 6, 6, side=2), image(2, 14, 7))
"""Of `PROMPT`, with text before, between and behind."""


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_the_features_of_the_images(chunk: int, overlap: bool) -> None:
    instance = Seeing(chunk=chunk, overlap=overlap)
    instance.submit(0, PROMPT, IMAGES)
    instance.submit(1, text(0, 20))
    instance.submit(2, PROMPT, [image(3, 0, 6, spans=2), image(4, 28, 2)])
    instance.run()
    instance.check(0, PROMPT, IMAGES)
    instance.check(1, text(0, 20), [])
    instance.check(2, PROMPT, [image(3, 0, 6, spans=2), image(4, 28, 2)])
    assert sorted(instance.executor.encoded) == [key_of(name) for name in (1, 2, 3, 4)]
    instance.check_empty()


def test_the_text_before_an_image_and_other_requests_go_on_without_it() -> None:
    instance = Seeing()
    instance.is_slow = True
    instance.submit(0, PROMPT, IMAGES)
    instance.submit(1, text(0, 20))
    for _ in range(20):
        instance.step()
    assert instance.finishes[room_of(1)].reason == "length"
    sequence = instance.scheduler._sequences.get(room_of(0))
    assert sequence is not None and sequence.kv_len == IMAGES[0].start
    assert not instance.scheduler.step(), "a turn computes nothing until an image comes"
    instance.source.prepare(key_of(2))
    assert not instance.scheduler.step(), "the second image is of no use yet"
    instance.source.prepare(key_of(1))
    instance.run()
    instance.check(0, PROMPT, IMAGES)


def test_a_cached_turn_asks_for_nothing_and_one_cached_up_to_the_middle_of_an_image_asks_for_that() -> None:
    instance = Seeing(info=msgspec.structs.replace(SEEING, image_rows=8))
    assert instance.ask(0, PROMPT, IMAGES) == 0
    assert len(instance.source.asked) == 2
    longer = [*PROMPT, *text(3, 9)]
    assert instance.ask(1, longer, IMAGES) == full_pages(len(PROMPT))
    assert len(instance.source.asked) == 2, "its images are in cached pages"
    middle = [*PROMPT[:18], *text(5, 12)]  # the last cached page ends at 16, inside the second image
    assert instance.ask(2, middle, (IMAGES[0], image(2, 14, 7))) == 16
    assert len(instance.source.asked) == 2, "its features are here still"
    instance.ask(3, text(0, 30), [image(9, 2, 8)])
    assert instance.ask(4, [*PROMPT[:18], *text(6, 12)], (IMAGES[0], image(2, 14, 7))) == 16
    assert [key for key, _ in instance.source.asked].count(key_of(2)) == 2, "its features are gone"
    instance.check_empty()


def test_equal_images_share_pages_and_others_none_from_the_first_page_of_the_image_on() -> None:
    for at in range(1, 12):
        instance = Seeing()
        instance.ask(0, PROMPT, [image(1, at, 9)])
        assert instance.ask(1, PROMPT, [image(2, at, 9)]) == at // PAGE_SIZE * PAGE_SIZE
        assert instance.ask(2, PROMPT, [image(1, at, 9)]) == full_pages(len(PROMPT))
        assert instance.ask(3, PROMPT) == at // PAGE_SIZE * PAGE_SIZE, "the same tokens as text"
        assert instance.ask(4, PROMPT, [image(1, at + 1, 9)]) == (at + 1) // PAGE_SIZE * PAGE_SIZE


def test_an_image_of_two_prompts_is_encoded_once() -> None:
    instance = Seeing()
    for index in range(3):
        instance.submit(index, text(index, 30), IMAGES)
    instance.run()
    for index in range(3):
        instance.check(index, text(index, 30), IMAGES)
    assert (
        sorted(instance.executor.encoded) == [key_of(1), key_of(2)] == sorted(key for key, _ in instance.source.asked)
    )
    assert instance.scheduler.load.images == 2 and instance.scheduler.load.image_rows_used == 0


def test_a_flush_forgets_features() -> None:
    instance = Seeing()
    instance.ask(0, PROMPT, IMAGES)
    instance.scheduler.flush_cache()
    assert instance.ask(1, PROMPT, IMAGES) == 0
    assert instance.executor.encoded == [key_of(1), key_of(2)] * 2


def test_the_rows_of_a_step_are_bounded_but_for_one_large_image() -> None:
    instance = Seeing(info=msgspec.structs.replace(SEEING, image_rows=64), most=8)
    images = [image(1, 0, 3), image(2, 3, 4), image(3, 7, 2), image(4, 9, 12), image(5, 21, 8)]
    instance.is_slow = True
    instance.submit(0, PROMPT, images)
    instance.step()
    instance.source.prepare()
    instance.is_slow = False
    instance.run()
    instance.check(0, PROMPT, images)
    assert instance.executor.most_encoded == 7 and len(instance.executor.encoded) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_an_urgent_prompt_takes_the_rows_with_which_others_wait(overlap: bool) -> None:
    instance = Seeing(most=64, overlap=overlap, chunk=1)
    late = [image(1, 20, 5), image(2, 25, 5)]
    instance.submit(0, PROMPT, late)
    for _ in range(3):
        instance.step()
    assert instance.gate.store.num_pinned == 10
    urgent = [image(3, 0, 9)]
    instance.submit(1, PROMPT, urgent, priority=-9)
    for _ in range(3):
        instance.step()
    assert instance.gate.store.num_pinned == 9 + 5, "the last image of the other prompt has given way"
    instance.run()
    instance.check(0, PROMPT, late)
    instance.check(1, PROMPT, urgent)
    assert instance.executor.encoded == [key_of(name) for name in (1, 2, 3, 2)]
    instance.check_empty()


def test_whole_images_are_computed_in_one_chunk() -> None:
    info = msgspec.structs.replace(SEEING, whole_images=True, image_rows=32)
    instance = Seeing(info=info, most=8, chunk=5)
    for index in range(3):
        images = [image(1 + 2 * index, 2 + index, 7), image(2 + 2 * index, 12 + index, 8)]
        instance.submit(index, PROMPT, images)
    instance.run()
    for index in range(3):
        images = [image(1 + 2 * index, 2 + index, 7), image(2 + 2 * index, 12 + index, 8)]
        instance.check(index, PROMPT, images)
    instance.submit(9, PROMPT, [image(9, 2, 9)])
    instance.run()
    assert instance.finishes[room_of(9)].code == Capacity.code
    assert "scheduler.max_batched_tokens" in instance.finishes[room_of(9)].message


# ----------------------------------------------------------------------------------------------- ends, refusals, faults


WRONG = {
    "a key of other length": ImagePart(b"short", ((0, 2, 0),)),
    "no rows": ImagePart(key_of(1), ()),
    "rows before the prompt": ImagePart(key_of(1), ((-1, 2, 0),)),
    "rows behind the prompt": ImagePart(key_of(1), ((29, 2, 0),)),
    "a huge position": ImagePart(key_of(1), ((1 << 40, 2, 0),)),
    "rows that overlap": ImagePart(key_of(1), ((3, 4, 0), (6, 2, 4))),
    "feature rows left out": ImagePart(key_of(1), ((3, 4, 1),)),
    "another grid": ImagePart(key_of(1), ((3, 4, 0),), (1, 3, 2)),
}


@pytest.mark.parametrize("what", WRONG)
def test_images_that_no_prompt_can_have_are_refused(what: str) -> None:
    pair = SeeingPair()
    pair.submit(0, PROMPT, [WRONG[what]])
    pair.run()
    assert pair.decode.finishes[room_of(0)].code == InvalidRequest.code
    assert isinstance(pair.prefill.failures[room_of(0)], InvalidRequest)


def test_an_image_larger_than_the_region_is_refused_and_an_instance_without_vision_takes_none() -> None:
    instance = Seeing()
    instance.submit(0, PROMPT, [image(1, 2, 17)])
    instance.run()
    assert instance.finishes[room_of(0)].code == Capacity.code
    assert (
        "17 rows" in instance.finishes[room_of(0)].message
        and "cache.image_rows" in instance.finishes[room_of(0)].message
    )
    blind = Seeing(info=msgspec.structs.replace(SEEING, image_rows=0))
    blind.submit(0, PROMPT, IMAGES)
    blind.run()
    assert blind.finishes[room_of(0)].code == InvalidRequest.code
    assert "no vision" in blind.finishes[room_of(0)].message


def test_a_bad_image_ends_its_requests_alone() -> None:
    instance = Seeing()
    instance.is_slow = True
    for index in range(3):
        instance.submit(index, PROMPT, [image(1 + index // 2, 6, 6)])
    instance.step()
    instance.source.fail(key_of(1), InvalidRequest("this image is damaged"))
    instance.is_slow = False
    instance.run()
    instance.check(2, PROMPT, [image(2, 6, 6)])
    for index in (0, 1):
        assert instance.finishes[room_of(index)].code == InvalidRequest.code
        assert "damaged" in instance.finishes[room_of(index)].message
    instance.check_empty()


def test_a_file_that_one_router_has_no_longer_is_asked_of_the_other() -> None:
    instance = Seeing()
    instance.is_slow = True
    instance.submit(0, PROMPT, IMAGES[:1], router=0)
    instance.step()
    instance.submit(1, PROMPT, IMAGES[:1], router=1)
    instance.submit(2, PROMPT, IMAGES[:1], router=0)
    instance.step()
    instance.scheduler.submit(CancelRequest(room_of(0)))
    instance.step()
    instance.source.fail(key_of(1), InvalidRequest("no running request has it"))
    instance.is_slow = False
    instance.run()
    for index in (1, 2):  # the second of router 0 came behind the question
        instance.check(index, PROMPT, IMAGES[:1])
    assert [router for _, router in instance.source.asked] == [0, 1]
    instance.check_empty()


def test_an_image_that_does_not_come_ends_its_requests_within_the_deadline() -> None:
    clock = FakeClock()
    instance = Seeing(clock=clock)
    instance.is_slow = True
    instance.submit(0, PROMPT, IMAGES)
    instance.step()
    for other in range(1, 5):  # the source is slow, and others keep it busy
        instance.submit(other, text(1, 9), [image(10 + other, 1, 2)])
        instance.step()
        clock.advance(20.0)
        instance.source.prepare(key_of(10 + other))
        instance.step()
        assert room_of(0) not in instance.finishes
    clock.advance(31.0)
    instance.step()
    assert instance.finishes[room_of(0)].code == TransferStalled.code
    assert "deadlines.transfer_s" in instance.finishes[room_of(0)].message
    instance.run()
    instance.check_empty()


@pytest.mark.parametrize("steps", range(8))
def test_a_cancelled_request_gives_up_its_rows_and_asks_for_nothing_more(steps: int) -> None:
    instance = Seeing(chunk=3, info=msgspec.structs.replace(SEEING, image_rows=8))
    instance.submit(0, PROMPT, IMAGES)
    for _ in range(steps):
        instance.step()
    instance.scheduler.submit(CancelRequest(room_of(0)))
    instance.run()
    assert instance.gate.store.num_pinned == 0
    instance.check_empty()
    instance.ask(1, PROMPT, IMAGES)


def test_a_cancelled_prompt_of_p_gives_up_its_rows_before_its_peer_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SeeingPair()
    monkeypatch.setattr(SeeingSide, "abort", lambda side, room, error: None)
    pair.prefill.is_slow = True
    pair.submit(0, PROMPT, IMAGES)
    for _ in range(6):
        pair.turn()
    pair.prefill.source.prepare(key_of(1))
    pair.prefill.step()
    pair.prefill.scheduler.submit(CancelRequest(room_of(0)))
    pair.prefill.step()
    assert not pair.prefill.scheduler.is_idle and pair.prefill.gate.store.num_pinned == 0
    assert not pair.prefill.source.open


def test_patches_that_raise_end_the_requests_of_the_image_alone() -> None:
    instance = Seeing()
    instance.executor.bad_patches.add(key_of(1))
    instance.submit(0, PROMPT, IMAGES)
    instance.submit(1, text(3, 25), [image(3, 4, 5)])
    instance.submit(2, PROMPT, [image(1, 0, 6)])
    instance.submit(3, text(2, 12))
    instance.run()
    for index in (0, 2):
        assert instance.finishes[room_of(index)].code == StepFailed.code
    instance.check(1, text(3, 25), [image(3, 4, 5)])
    instance.check(3, text(2, 12), [])
    instance.check_empty()


@pytest.mark.parametrize("seed", range(10))
def test_a_step_that_raised_is_repeated_with_its_images(seed: int) -> None:
    rng, instance = random.Random(seed), Seeing(chunk=3)
    execute = instance.executor.execute

    def failing(plan: Any, on_layer: Any = None) -> Any:
        if plan.prefill and len(plan.prefill) > 1 and rng.random() < 0.3:
            raise ValueError("once")
        return execute(plan, on_layer)

    instance.executor.execute = failing  # type: ignore[method-assign]
    for index in range(3):
        instance.submit(index, PROMPT, [image(1 + index, 3 + index, 5), image(4, 12, 6)])
    instance.run()
    for index in range(3):
        instance.check(index, PROMPT, [image(1 + index, 3 + index, 5), image(4, 12, 6)])
    instance.check_empty()


@pytest.mark.parametrize("steps", range(1, 8))
def test_other_weights_have_features_of_their_own(steps: int) -> None:
    instance = Seeing(chunk=3)
    instance.ask(0, PROMPT, IMAGES)
    instance.submit(1, text(1, 30), [image(2, 20, 7)])
    instance.change_weights(1, 1)
    instance.run()
    assert instance.executor.weights == 1
    instance.ask(2, PROMPT, IMAGES)
    instance.check_empty()


def test_features_placed_before_a_mixed_change_of_weights_are_encoded_again() -> None:
    instance = Seeing(chunk=4)
    instance.submit(0, [*text(1, 4), *PROMPT], [image(1, 12, 6)])
    for _ in range(2):
        instance.step()
    assert instance.gate.store.num_pinned == 6
    instance.change_weights(1, 1)
    instance.run()
    assert instance.executor.weights == 1 and instance.executor.encoded == [key_of(1)] * 2
    instance.check_empty()


class TieredEyes(Engine, VisionExecutor):
    """Eyes of an instance with tiers."""

    def __init__(self, info: ExecutorInfo, num_pages: int, page_size: int, aux_rows: NDArray[np.uint8]) -> None:
        super().__init__(info, num_pages, page_size, aux_rows)
        self.info, self.region = SEEING, np.zeros(SEEING.image_rows, np.uint32)


def test_tiers_have_the_pages_of_an_image_and_its_prompt_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_world, "Engine", TieredEyes)
    instance = Tiered(16)
    source = instance.scheduler._images._source = PumpedSource()
    for index, (images, loaded) in enumerate(
        [(IMAGES, 0), (IMAGES, 28), ((image(1, 6, 6, side=2), image(7, 14, 7)), 12)]
    ):
        half = unified_request(room_of(index), "r", pack_i32(PROMPT), SamplingParams(3, temperature=0.0), images=images)
        instance.scheduler.submit(half)
        while room_of(index) not in instance.finishes:
            instance.pump()
            source.prepare()
            instance.step()
        instance.run()
        assert instance.tokens[room_of(index)] == expected_with_images(PROMPT, images, 3, INFO.vocab_size)
        assert instance.cached.get(room_of(index), 0) == loaded
        instance.evict()
    assert [key for key, _ in source.asked] == [key_of(1), key_of(2), key_of(7)]


class StatefulEyes(Eyes):
    """Eyes of a model with recurrent state, whose rows take in tokens, not features."""

    def __init__(
        self,
        info: ExecutorInfo,
        num_pages: int,
        page_size: int,
        aux_rows: NDArray[np.uint8],
        state_rows: NDArray[np.uint8],
    ) -> None:
        super().__init__(info, num_pages, page_size, aux_rows)
        self._state_rows = state_rows


def test_with_recurrent_state_a_prompt_goes_on_behind_images_and_elsewhere_if_its_step_raised() -> None:
    instance = Seeing(executor=StatefulEyes, state_slots=6, chunk=4)
    assert instance.ask(0, PROMPT, IMAGES) == 0
    assert instance.ask(1, [*PROMPT[:29], *text(3, 9)], IMAGES) == 28, "behind the snapshot"
    assert len(instance.source.asked) == 2
    instance.submit(2, PROMPT, [image(3, 6, 6), image(4, 20, 4)])
    instance.submit(3, text(2, 30))
    instance.submit(4, PROMPT, [image(5, 26, 3)])
    execute, sequences = instance.executor.execute, instance.scheduler._sequences

    def failing(plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        sequence = sequences.get(room_of(2))
        if sequence is not None and sequence.kv_len > 8 and len(plan.prefill) > 1:
            instance.executor.execute = execute  # type: ignore[method-assign]
            raise ValueError("once")
        return execute(plan, on_layer)

    instance.executor.execute = failing  # type: ignore[method-assign]
    instance.run()
    assert instance.finishes[room_of(2)].code == DecodeLost.code
    instance.check(3, text(2, 30), [])
    instance.check(4, PROMPT, [image(5, 26, 3)])
    instance.check_empty()


def test_beside_decode_steps_prompts_with_images_compute_in_their_lane() -> None:
    instance = Seeing(lanes=2, chunk=4, info=msgspec.structs.replace(SEEING, image_rows=14))
    instance.submit(0, text(3, 9), max_tokens=40)
    for _ in range(6):
        instance.step()
    instance.submit(1, PROMPT, IMAGES)
    instance.submit(2, PROMPT, [image(3, 1, 7), image(4, 9, 8)])
    num_beside = 0
    while not instance.scheduler.is_idle:
        instance.step()
        num_beside += instance.late.beside is not None
        instance.late.run_next()
        instance.late.run_beside()
    instance.check(0, text(3, 9), [], 40)
    instance.check(1, PROMPT, IMAGES)
    instance.check(2, PROMPT, [image(3, 1, 7), image(4, 9, 8)])
    assert num_beside
    instance.check_empty()


# -------------------------------------------------------------------------------------------------------------- P and D


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_d_seeing", [False, True])
def test_p_and_d_give_the_tokens_of_a_unified_instance(overlap: bool, is_d_seeing: bool) -> None:
    pair = SeeingPair(overlap=overlap, is_d_seeing=is_d_seeing)
    pair.submit(0, PROMPT, IMAGES)
    pair.submit(1, text(4, 17))
    pair.submit(2, PROMPT, [image(3, 0, 6, spans=2, side=2), image(1, 12, 6, side=3)], max_tokens=6)
    pair.run()
    pair.decode.check(0, PROMPT, IMAGES)
    pair.decode.check(1, text(4, 17), [])
    pair.decode.check(2, PROMPT, [image(3, 0, 6, spans=2, side=2), image(1, 12, 6, side=3)], 6)
    assert not pair.decode.source.asked and len(pair.prefill.source.asked) == 3
    for instance in (pair.prefill, pair.decode):
        instance.check_empty()


def test_each_block_of_the_tower_is_a_sign_of_life_of_the_step_thread_and_of_p() -> None:
    pair = SeeingPair()
    for instance, advances in ((pair.prefill, 1), (pair.decode, 0)):
        turns, before = instance.scheduler.turns, pair.wire.__dict__.get("advances", 0)
        instance.scheduler._note_block()
        assert instance.scheduler.turns == turns + 1
        assert pair.wire.__dict__.get("advances", 0) == before + advances


def test_d_finds_the_pages_of_an_image_and_not_those_of_another() -> None:
    pair = SeeingPair()
    pair.ask(0, PROMPT, [image(1, 5, 9)])
    pair.ask(1, PROMPT, [image(2, 5, 9)])
    assert pair.wire.prefix_pages[room_of(1)] == 5 // PAGE_SIZE
    assert pair.ask(2, PROMPT, [image(1, 5, 9)]) == full_pages(len(PROMPT))
    assert pair.wire.prefix_pages[room_of(2)] == len(PROMPT) // PAGE_SIZE
    longer = [*PROMPT, *pair.decode.tokens[room_of(2)], *text(2, 3)]
    assert pair.ask(3, longer, [image(1, 5, 9)]) >= full_pages(len(PROMPT))
    assert len(pair.prefill.source.asked) == 2


def test_a_half_of_d_without_the_images_gives_other_tokens() -> None:
    """Planted: D would find pages of text, and rotate its tokens as those of text."""
    pair = SeeingPair()
    pair.ask(0, PROMPT)
    pair.submit(1, PROMPT, IMAGES, of_d=())
    pair.run()
    assert pair.wire.prefix_pages[room_of(1)] == len(PROMPT) // PAGE_SIZE, "pages of another prompt"
    assert pair.decode.tokens[room_of(1)] != expected_with_images(PROMPT, IMAGES, 3, INFO.vocab_size)


def test_choices_of_a_prompt_with_images_share_it() -> None:
    forks = tuple(Fork(room_of(10 + choice), f"c{choice}", choice) for choice in range(3))
    pair, alone = SeeingPair(), Seeing()
    pair.submit(0, PROMPT, IMAGES, forks=forks)
    alone.submit(0, PROMPT, IMAGES, forks=forks)
    pair.run()
    alone.run()
    for instance in (pair.decode, alone):
        for choice in range(3):
            instance.check(10 + choice, PROMPT, IMAGES)
        instance.check_empty()
    assert len(pair.prefill.executor.encoded) == len(alone.executor.encoded) == 2


def test_a_retracted_request_resumes_behind_its_images() -> None:
    instance = Seeing(num_pages=16, chunk=16)
    prompts = [(text(index, 14), [image(1 + index, 2, 6, side=2)]) for index in range(4)]
    for index, (prompt, images) in enumerate(prompts):
        instance.submit(index, prompt, images, max_tokens=24)
    instance.run()
    assert instance.scheduler.load.retractions
    for index, (prompt, images) in enumerate(prompts):
        instance.check(index, prompt, images, 24)
    assert len(instance.executor.encoded) == 4
    instance.check_empty()


@pytest.mark.parametrize("killed", ["P", "D"])
def test_a_request_goes_on_elsewhere_behind_a_killed_instance(killed: str) -> None:
    before, after = SeeingPair(), SeeingPair()
    before.submit(0, PROMPT, IMAGES, max_tokens=12)
    while len(before.decode.tokens.get(room_of(0), ())) < (4 if killed == "D" else 1):
        before.turn()
    tokens = before.decode.tokens[room_of(0)]
    after.submit(1, [*PROMPT, *tokens], IMAGES, max_tokens=12, num_emitted=len(tokens))
    after.run()
    whole = expected_with_images(PROMPT, IMAGES, 12, INFO.vocab_size)
    assert tokens + after.decode.tokens[room_of(1)] == whole
    unified = Seeing()
    unified.submit(1, [*PROMPT, *tokens], IMAGES, max_tokens=12, num_emitted=len(tokens))
    unified.run()
    assert unified.tokens[room_of(1)] == whole[len(tokens) :]


def test_a_prompt_that_gives_way_on_p_gives_up_its_rows() -> None:
    pair = SeeingPair(num_pages=10)
    early = text(1, 36), [image(3, 20, 12)]
    pair.prefill.scheduler.submit(prefill_request(room_of(1), "r1", pack_i32(early[0]), 0, 1, images=tuple(early[1])))
    while pair.prefill.gate.store.num_pinned < 12:
        pair.prefill.step()
    pair.submit(0, PROMPT, IMAGES)
    while room_of(0) not in pair.decode.finishes:
        pair.turn()
    pair.decode.check(0, PROMPT, IMAGES)
    pair.submit_to_d(1, *early)
    pair.run()
    pair.decode.check(1, *early)
    assert pair.prefill.executor.encoded.count(key_of(3)) == 2 and pair.prefill.gate.store.num_pinned == 0


# ------------------------------------------------------------------------------------------------------ planted faults


def _keys_without_content(images: Any, size: int) -> dict[int, bytes]:
    return {start // size: start.to_bytes(4, "little") for start, _ in images}


def _reserve_pinned(store: FeatureStore, key: bytes, num_rows: int) -> StoredImage:
    rows = np.arange(num_rows, dtype=np.int32)
    found = store._images[key] = StoredImage(key, rows)
    return found


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "content is missing from the page key": (prefix_index, "marks_by_block", _keys_without_content),
    "rows are given to another image while they are pinned": (FeatureStore, "reserve", _reserve_pinned),
    "features of other weights stay": (FeatureStore, "drop_all", lambda store: None),
    "a chunk goes on into an image that is not placed": (
        PromptImages,
        "chunk_length",
        lambda images, start, length, most: length,
    ),
    "rows of an image are not those of its span": (
        PromptImages,
        "_set_rows",
        lambda images, index, image, found=PromptImages._set_rows: [
            (place, rows[4:] + rows[:4]) for place, rows in found(images, index, image)
        ],
    ),
}


@pytest.mark.parametrize("fault", [*PLANTED, None])
def test_planted_faults_change_tokens_or_break_a_plan(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        owner, name, wrong = PLANTED[fault]
        monkeypatch.setattr(owner, name, wrong)

    def serve() -> None:
        instance = Seeing(chunk=3)
        loads = [IMAGES, [image(3, 6, 6)], [image(1, 20, 6, side=2), image(4, 26, 3)]]
        for index, images in enumerate(loads):
            instance.submit(index, PROMPT, images)
        instance.run()
        for index, images in enumerate(loads):
            instance.check(index, PROMPT, images)
        instance.ask(7, PROMPT, [image(5, 6, 6, side=2), IMAGES[1]])
        instance.change_weights(1, 1)
        instance.run()
        instance.ask(9, PROMPT, IMAGES)
        instance.check_empty()

    if fault is None:
        serve()
        return
    with pytest.raises((AssertionError, Internal)):
        serve()


# ----------------------------------------------------------------------------------------------------- random loads


prompts = st.lists(
    st.tuples(
        st.integers(4, 40),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=4),
        st.integers(-2, 2),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)
"""Length, images (name and text before it), priority, and whether it is cancelled at some time."""
SIZES = [1, 3, 4, 6, 9, 12]
"""Rows of each image by its name."""


def laid_out(length: int, parts: list[tuple[int, int]]) -> tuple[list[int], list[ImagePart]]:
    at, images = 0, list[ImagePart]()
    for name, gap in parts:
        images.append(image(name, at + gap, SIZES[name], spans=1 + (name == 3), side=1 + name % 2))
        at = images[-1].end
    return text(0, max(length, at + 1)), images


@given(prompts, st.integers(12, 30), st.integers(0, 1 << 30), st.booleans(), st.booleans(), st.integers(1, 9))
def test_every_prompt_ends_whatever_comes_when(
    load: list[tuple[int, list[tuple[int, int]], int, bool]],
    image_rows: int,
    seed: int,
    is_whole: bool,
    overlap: bool,
    chunk: int,
) -> None:
    rng = random.Random(seed)
    info = msgspec.structs.replace(SEEING, image_rows=image_rows, whole_images=is_whole)
    instance = Seeing(40, info, most=rng.choice((13, 16)), overlap=overlap, chunk=chunk)
    instance.is_slow = True
    made = [laid_out(length, parts) for length, parts, _, _ in load]
    pending, cancelled = list(range(len(load))), set[int]()
    for _ in range(5000):
        if pending and rng.random() < 0.4:
            index = pending.pop(0)
            instance.submit(index, *made[index], priority=load[index][2])
        if instance.source.open and rng.random() < 0.5:
            instance.source.prepare(rng.choice(sorted(instance.source.open)))
        for index, (_, _, _, is_cancelled) in enumerate(load):
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
    instance.check_empty()


def test_an_instance_that_prepares_no_images_says_so_of_each() -> None:
    source = NoImages()
    for key in (b"a" * 16, b"b" * 16, b"a" * 16):
        source.ask(key, 0)
    source.drop(b"b" * 16)
    [prepared] = source.take()
    assert prepared.key == b"a" * 16 and prepared.error is not None and "prepares no images" in prepared.error.message
    assert source.take() == []
