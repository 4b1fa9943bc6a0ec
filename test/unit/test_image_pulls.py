"""Images that P has encoded by E: right rows, faults that checksums find, and E that die, are silent, slow or full."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from encode_world import DEADLINES, ROW_BYTES, EncodeWorld
from image_world import text
from scheduler_world import room_of
from support.fake_transport import Fault, FaultKind
from support.images import image, key_of

from chitu.errors import InvalidRequest
from chitu.instance.images import StoredImage
from chitu.instance.sequences import Sequence
from chitu.kv_transfer.transports.transport import CopyList
from chitu.protocol import ImagePart

PROMPT = text(0, 30)
IMAGES = (image(1, 6, 6, side=2), image(2, 14, 7), image(4, 22, 5))
KEYS = [each.key for each in IMAGES]


def ask(world: EncodeWorld, index: int, images: tuple[ImagePart, ...] = IMAGES, step_s: float = 0.0) -> None:
    """Serve a request and require the tokens that these images give."""
    world.p.submit(index, text(index, 30), images)
    world.run(step_s=step_s)
    world.p.check(index, text(index, 30), images)


def encoded(world: EncodeWorld) -> list[bytes]:
    return sorted(key for each in world.encoders for key in each.tower.encoded)


def test_images_of_a_request_are_encoded_by_several_e_and_not_by_p() -> None:
    world = EncodeWorld(3)
    ask(world, 0)
    assert encoded(world) == sorted(KEYS) and not world.p.executor.encoded and not world.p.source.asked
    assert len([each for each in world.encoders if each.tower.encoded]) > 1
    assert world.pulls.num_filled == 3 and not world.pulls.num_failed
    world.check_empty()


def test_a_request_without_images_asks_nobody() -> None:
    world = EncodeWorld()
    ask(world, 0, ())
    assert not encoded(world) and world.fabric.num_writes == 0


def test_an_image_that_comes_again_is_encoded_once_on_the_e_that_has_it() -> None:
    world = EncodeWorld(3)
    for index in range(4):
        ask(world, index)
        world.p.gate.store.drop_all()
    assert encoded(world) == sorted(KEYS) and world.pulls.num_filled == 12
    world.check_empty()


def test_without_e_p_encodes() -> None:
    world = EncodeWorld(0)
    ask(world, 0)
    assert sorted(world.p.executor.encoded) == sorted(KEYS)
    world.check_empty()


def shifted(copies: CopyList) -> CopyList:
    """Write rows one row further, and the last one into the place of the first."""
    if copies.nbytes % ROW_BYTES or copies.nbytes // ROW_BYTES < 2:
        return copies  # the aux row
    src = [
        at + row * ROW_BYTES for at, n in zip(copies.src, copies.length, strict=True) for row in range(n // ROW_BYTES)
    ]
    dst = [
        at + row * ROW_BYTES for at, n in zip(copies.dst, copies.length, strict=True) for row in range(n // ROW_BYTES)
    ]
    return CopyList(src, [*dst[1:], dst[0]], [ROW_BYTES] * len(src))


def test_rows_shifted_by_one_are_found_and_p_encodes() -> None:
    world = EncodeWorld(1)
    world.encoders[0].transport.bend = shifted
    ask(world, 0)
    assert world.pulls.num_failed and not world.pulls.num_filled
    assert sorted(world.p.executor.encoded) == sorted(KEYS)
    world.check_empty()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_flipped_bit_is_found_and_another_e_is_asked(num_before: int) -> None:
    """In the aux row, which leaves first, or in a feature row."""
    world, num_writes = EncodeWorld(2), 0

    def corrupt(target: str, copies: CopyList) -> None:
        nonlocal num_writes
        if num_writes == num_before:
            world.fabric.inject(Fault(FaultKind.CORRUPT, target, 3))
        num_writes += 1

    world.fabric.on_write = corrupt
    ask(world, 0)
    assert world.pulls.num_failed == 1 and world.pulls.num_filled == 3
    world.check_empty()


def test_features_of_another_image_are_found() -> None:
    """E sends the rows of the wrong image of its own: their sums are right, and they name another image."""
    world = EncodeWorld(1)
    ask(world, 0, (image(8, 6, 6),))
    wrong = world.encoders[0].store.find(key_of(8))
    world.encoders[0].store.find = lambda key: wrong  # type: ignore[method-assign]
    ask(world, 1, (image(9, 6, 6),))
    assert world.pulls.num_failed == 1 and world.p.executor.encoded == [key_of(9)]
    world.check_empty()


@pytest.mark.parametrize("fault", ["killed", "deaf", "slow", "full", "bad"])
@pytest.mark.parametrize("num_encoders", [1, 2])
def test_an_e_that_does_not_encode_is_replaced_by_another_one_and_then_by_p(fault: str, num_encoders: int) -> None:
    world = EncodeWorld(num_encoders)
    world.turn()
    for each in world.encoders[: 1 if num_encoders == 1 else 2]:
        each.is_deaf, each.is_slow = fault == "deaf", fault in ("slow", "killed")
        each.tower.bad = set(KEYS) if fault == "bad" else set()
        if fault == "full":
            each.scheduler.drain()
    world.p.submit(0, PROMPT, IMAGES)
    world.p.submit(1, text(7, 20))
    for _ in range(4):
        world.turn()
    if fault == "killed":
        for each in world.encoders:
            each.is_dead = True
        world.fabric.kill("E0")
        world.show(*world.encoders)
    world.run(step_s=0.3, lends=True)
    world.p.check(0, PROMPT, IMAGES)
    world.p.check(1, text(7, 20), [])
    assert sorted(world.p.executor.encoded) == sorted(KEYS) and not world.pulls.num_filled
    assert world.clock.monotonic() < DEADLINES.bootstrap_s + 2
    for each in world.encoders:
        each.is_deaf = each.is_slow = False
    world.run(step_s=0.3)
    world.check_empty()


@pytest.mark.parametrize("fault", ["killed", "deaf", "slow"])
def test_one_of_two_e_that_fails_leaves_its_images_to_the_other(fault: str) -> None:
    world = EncodeWorld(2)
    world.turn()
    chosen = world.pulls.choose(KEYS[0], 6)
    assert chosen is not None
    bad = world.encoders[chosen.engine_rank]
    bad.is_deaf, bad.is_slow = fault == "deaf", fault in ("slow", "killed")
    world.p.submit(0, PROMPT, IMAGES)
    for _ in range(4):
        world.turn()
    if fault == "killed":
        bad.is_dead = True
        world.show(bad)
    world.run(step_s=0.3, lends=True)
    world.p.check(0, PROMPT, IMAGES)
    other = world.encoders[1 - bad.rank]
    assert sorted(other.tower.encoded) == sorted(KEYS) and not world.p.executor.encoded
    bad.is_deaf = bad.is_slow = False
    world.run(step_s=0.3)
    world.check_empty()


def test_a_text_request_does_not_wait_for_an_e_that_is_silent() -> None:
    world = EncodeWorld(1)
    world.turn()
    world.encoders[0].is_deaf = True
    world.p.submit(0, PROMPT, IMAGES)
    world.p.submit(1, text(3, 20))
    for _ in range(20):
        world.turn()
    assert world.p.finishes[room_of(1)].reason == "length" and room_of(0) not in world.p.finishes


def test_a_write_that_lands_late_lands_in_rows_that_nobody_has() -> None:
    world = EncodeWorld(1)
    world.turn()
    world.fabric.inject(*[Fault(FaultKind.LATE, "P") for _ in range(3)])
    world.p.submit(0, PROMPT, IMAGES)
    for _ in range(60):
        world.turn()
    world.p.check(0, PROMPT, IMAGES)
    assert world.fabric.num_late_writes and len(world.pulls), "its rows are lent still"
    lent = {row for pull in world.pulls._pulls.values() for row in pull.image.rows.tolist()}
    before = world.p.executor.region.copy()
    ask_rows = {row for each in world.p.gate.store._images.values() for row in each.rows.tolist()}
    assert not lent & ask_rows
    world.fabric.release_late_writes()
    after = world.p.executor.region
    changed = {row for row in range(len(after)) if after[row] != before[row]}
    assert changed <= lent
    world.run(step_s=0.3)
    ask(world, 1)
    world.check_empty()


def test_a_frozen_e_keeps_its_rows_until_its_process_has_ended() -> None:
    world = EncodeWorld(1)
    world.turn()
    frozen = world.encoders[0]
    frozen.is_slow = True
    world.p.submit(0, PROMPT, IMAGES)
    for _ in range(5):
        world.turn()
    frozen.is_deaf = True
    world.p.submit(1, text(4, 30), IMAGES)
    for _ in range(100):
        world.turn()
        world.clock.advance(0.3)
    world.p.check(0, PROMPT, IMAGES)
    assert world.pulls.num_lent == sum(each.num_rows for each in IMAGES) and not world.p.scheduler.is_idle
    frozen.is_dead = True
    world.show(frozen)
    world.run(step_s=0.3)
    world.check_empty()


def test_most_of_the_region_is_never_lent() -> None:
    world = EncodeWorld(1, image_rows=24)
    most = 0

    def note() -> None:
        nonlocal most
        most = max(most, world.pulls.num_lent)

    begin = world.pulls.begin
    world.pulls.begin = lambda *args: (begin(*args), note())[0]  # type: ignore[method-assign]
    ask(world, 0)
    assert 0 < most <= 12 and world.p.executor.encoded and world.encoders[0].tower.encoded
    world.check_empty()


def test_an_image_that_e_cannot_read_does_not_let_it_rest() -> None:
    world = EncodeWorld(1)
    world.encoders[0].is_slow = True
    world.p.submit(0, PROMPT, IMAGES[:1])
    for _ in range(4):
        world.turn()
    world.encoders[0].source.fail(KEYS[0], InvalidRequest("no image"))
    world.encoders[0].is_slow = False
    world.run(step_s=0.1)
    ask(world, 1, (image(5, 3, 4),))
    assert world.pulls.num_failed == 1 and world.pulls.num_filled == 1
    world.check_empty()


def test_frames_that_come_twice_or_never_change_nothing() -> None:
    """Orders and announcements are repeated until they are answered."""
    world = EncodeWorld(1)
    world.turn()
    world.encoders[0].is_slow = True
    world.p.submit(0, PROMPT, IMAGES)
    for _ in range(5):
        world.turn()
        world.clock.advance(0.6)
    world.encoders[0].is_slow = False
    world.run()
    world.p.check(0, PROMPT, IMAGES)
    assert encoded(world) == sorted(KEYS)
    load = world.encoders[0].scheduler.load
    assert load.images == 3 and load.tokens == 18
    assert msgspec.structs.asdict(load)["image_rows"] == 64
    world.check_empty()


def test_rows_that_an_unread_step_reads_are_lent_to_nobody() -> None:
    """E writes whenever it likes, and a step that is launched may run much later on a GPU."""
    world = EncodeWorld(2, overlap=True)
    gate, resources = world.p.gate, world.p.scheduler._core.sequences.resources
    read_by: dict[int, int] = {}
    note, unpin, lent = gate.note_computed, gate.store.unpin, list[int]()

    def noting(sequence: Sequence, when_read: Callable[[Callable[[], None]], None]) -> None:
        assert sequence.images is not None
        for each in sequence.images.placed:
            read_by[id(each)] = resources._num_launched
        note(sequence, when_read)

    def unpinning(image: StoredImage) -> None:
        if id(image) in read_by:
            lent.append(resources._num_read - read_by[id(image)])
        unpin(image)

    gate.note_computed, gate.store.unpin = noting, unpinning  # type: ignore[method-assign]
    ask(world, 0)
    assert len(lent) == 3 and min(lent) >= 0, "an image may be written again before the step that reads it has run"
    world.check_empty()
