"""Images on the router: what instances are sent, which ways are left out, prefix names, and how long files stay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, pair, two_pairs
from support.images import image, key_of
from support.requests import generate_request

from chitu.errors import NoInstance, TooManyRequests
from chitu.kv_cache.prefix_index import PageKeys
from chitu.protocol import (
    ClusterView,
    DecodeRequest,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
    page_marks,
)
from chitu.router.costs import SLO
from chitu.router.generation import GenerateRequest, Generation
from chitu.router.image_files import ImageFiles
from chitu.router.prefix_history import BLOCK_TOKENS, prefix_names
from chitu.types import Role

IMAGES = (image(1, 0, 2), image(2, 2, 1))
FILES = {key_of(1): b"one", key_of(2): b"three"}


def seen(world: World, **fields: Any) -> tuple[Generation, bytes]:
    return world.add(images=IMAGES, files=FILES, **fields)


def held(world: World) -> tuple[int, int]:
    """Return how many files the router has, and their bytes, as its metrics show them."""
    metrics = world.router.metrics()
    return metrics.image_files, metrics.image_bytes


# ---------------------------------------------------------------------------------------------------- what is sent


def test_all_halves_of_all_attempts_have_the_images() -> None:
    world = two_pairs()
    generation, room = seen(world)
    first = world.sent_to(room)
    assert {type(half) for half in first.values()} == {PrefillRequest, DecodeRequest}
    assert all(half.head.images == IMAGES for half in first.values())
    world.emit(room, 7)
    world.lose(Role.DECODE, int(world.pair(generation)[-1]))
    again = world.sent_to(world.room(generation))
    assert again and world.room(generation) != room
    assert all(half.head.images == IMAGES and half.head.num_emitted == 1 for half in again.values())
    unified = World(Role.UNIFIED)
    _, room = seen(unified)
    (half,) = unified.sent_to(room).values()
    assert isinstance(half, UnifiedRequest) and half.head.images == IMAGES


def test_a_group_of_choices_has_the_images_once_and_its_files_until_the_last_ends() -> None:
    world = pair()
    generations = world.add_choices(3, images=IMAGES, files=FILES)
    group = generations[0].attempt.group  # type: ignore[union-attr]
    assert group is not None
    assert all(half.head.images == IMAGES for half in world.sent_to(group.room).values())
    for left, generation in zip((2, 2, 0), generations, strict=True):
        world.router.cancel(generation)
        assert held(world)[0] == left


def test_requests_of_text_are_sent_as_before() -> None:
    world = pair()
    _, room = world.add()
    assert all(half.head.images == () for half in world.sent_to(room).values()) and held(world) == (0, 0)


# ------------------------------------------------------------------------------------------------- files of requests


def finish(world: World, generation: Generation, room: bytes) -> None:
    world.emit(room, 1, 2, finish="stop")


def fail(world: World, generation: Generation, room: bytes) -> None:
    world.decode_fails(room, "invalid_request")


def cancel(world: World, generation: Generation, room: bytes) -> None:
    world.router.cancel(generation)


def complete(world: World, generation: Generation, room: bytes) -> None:
    world.router.cancel(generation, is_complete=True)


def run_out_of_time(world: World, generation: Generation, room: bytes) -> None:
    world.clock.advance(61.0)
    world.router.tick()


def fail_all(world: World, generation: Generation, room: bytes) -> None:
    world.router.fail_all(NoInstance("the process ends"))


def lose_everybody(world: World, generation: Generation, room: bytes) -> None:
    for role, rank in ((Role.PREFILL, 0), (Role.DECODE, 0)):
        world.lose(role, rank)


@pytest.mark.parametrize("end", [finish, fail, cancel, complete, run_out_of_time, fail_all, lose_everybody])
def test_files_stay_until_the_request_ends_in_whatever_way(end: Any) -> None:
    world = pair()
    generation, room = seen(world)
    assert held(world) == (2, 8) and world.router.image_files.find(key_of(2)) == b"three"
    end(world, generation, room)
    assert generation.done and held(world) == (0, 0) and world.router.image_files.find(key_of(2)) is None


def test_files_stay_while_a_request_is_tried_elsewhere() -> None:
    world = two_pairs()
    generation, room = seen(world)
    world.fails("P0", room, "prefill_lost")
    assert not generation.done and held(world) == (2, 8)
    world.emit(world.room(generation), 1, finish="stop")
    assert held(world) == (0, 0)


def test_a_request_that_no_instance_takes_leaves_no_files() -> None:
    world = pair()
    world.lose(Role.DECODE)
    with pytest.raises(NoInstance):
        seen(world)
    assert held(world) == (0, 0)
    full = pair()
    full.outbox.full |= full.outbox.peers
    with pytest.raises(NoInstance):
        seen(full)
    assert held(full) == (0, 0)


def test_files_are_bounded_and_a_request_beyond_the_bound_is_refused_and_counted() -> None:
    world = pair()
    world.router.image_files._max_bytes = 10
    seen(world)
    seen(world)  # the same files
    with pytest.raises(TooManyRequests, match=r"router\.max_total_body_bytes"):
        world.add(images=(image(3, 0, 2),), files={key_of(3): b"abc"})
    assert held(world) == (2, 8) and world.router.in_flight == 2
    assert world.router.metrics().rejected == {TooManyRequests.code: 1}


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 4)), st.integers(0, 9)), max_size=40))
def test_a_file_is_there_as_long_as_one_request_has_it(steps: list[tuple[bool, set[int], int]]) -> None:
    files, running = ImageFiles(1 << 20), list[set[int]]()
    for begins, names, place in steps:
        if begins or not running:
            files.add({key_of(name): bytes(name) for name in names})
            running.append(names)
        else:
            files.release({key_of(name): b"" for name in running.pop(place % len(running))})
        names = set().union(*running)
        assert len(files) == len(names) and files.num_bytes == sum(names)
        assert [name for name in range(5) if files.find(key_of(name)) is not None] == sorted(names)


# --------------------------------------------------------------------------------------------------- ways and names


def computing(world: World) -> None:
    """Let D0 compute prompts by itself."""
    for place, instance in enumerate(world.instances):
        if instance.role is Role.DECODE:
            world.instances[place] = msgspec.structs.replace(instance, computes=True)
    world.router.on_view(ClusterView(1, 9, tuple(world.instances)))


def test_no_d_computes_a_prompt_with_images_alone() -> None:
    world = pair()
    computing(world)
    for _ in range(4):
        generation, room = seen(world, slo=SLO(1.0, 0.1))
        assert world.pair(generation) == "P0-D0"
        world.emit(room, 1, finish="stop")
    world.lose(Role.PREFILL)
    text, _ = world.add()
    assert world.pair(text) == "D0"
    with pytest.raises(NoInstance):
        seen(world)


@given(st.integers(0, 3 * BLOCK_TOKENS), st.integers(1, 300))
def test_names_and_keys_differ_from_the_block_of_another_image_on(at: int, length: int) -> None:
    num_tokens = 4 * BLOCK_TOKENS
    tokens = pack_i32(range(num_tokens))
    one, other = [(image(name, at, min(length, num_tokens - at)),) for name in (1, 2)]
    names = [prefix_names(tokens, "", images) for images in (one, one, other, ())]
    block = at // BLOCK_TOKENS
    assert names[0] == names[1] and len(names[0]) == 4
    for others in names[2:]:
        assert others[:block] == names[0][:block] and not set(others[block:]) & set(names[0][block:])
    keys = [PageKeys.of(b"f", 16, images=page_marks(images)).upto(64, tokens) for images in (one, one, other, ())]
    page = at // 16
    assert keys[0] == keys[1]
    for others in keys[2:]:
        assert others[:page] == keys[0][:page] and not set(others[page:]) & set(keys[0][page:])


def test_keys_of_text_are_what_they_were() -> None:
    tokens = pack_i32(range(64))
    keys = PageKeys.of(b"f", 16)
    assert keys.upto(2, tokens) == keys.copy().upto(4, tokens)[:2] == PageKeys.of(b"f", 16, images=()).upto(2, tokens)
    assert keys.upto(1, tokens)[0].hex() == "7a46b987943ea4d7f94521735e602378"
    marked = PageKeys.of(b"f", 16, images=page_marks(IMAGES))
    assert marked.copy().upto(4, tokens) == [marked.key_at(page, tokens) for page in range(4)]


def test_a_request_knows_nothing_of_files_that_it_has_not() -> None:
    request = generate_request("r", pack_i32([1]), 1, SamplingParams(max_tokens=1))
    assert isinstance(request, GenerateRequest) and request.images == () and request.files == {}
