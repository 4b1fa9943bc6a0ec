"""Images in the cost of a way, and the E that is chosen for each."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from encode_world import LAYOUT as FEATURES
from encode_world import ROW_BYTES, EncodeWorld
from image_world import text
from router_world import World
from scheduler_world import room_of
from support.images import image, key_of
from test_costs import Fleet, info, prompt
from test_image_pulls import encoded

from chitu.config.schema import SLOConfig
from chitu.http.fleet.changes import ChangeLog
from chitu.instance.images import FeatureStore
from chitu.protocol import (
    ANY_ENCODER,
    MAX_REPORTED_KEYS,
    NO_ENCODER,
    REPORTED_KEY_BYTES,
    ClusterView,
    ImageLoad,
    ImagePart,
    InstanceInfo,
    LoadReport,
    PathLoad,
    encoder_preference,
)
from chitu.protocol.snapshot import InstanceSnapshot
from chitu.router.candidates import InstanceKey, Way
from chitu.router.costs import HOST_BYTES_PER_S
from chitu.router.image_ways import ON_ITS_WAY_S, PRIOR_ROW_S
from chitu.router.ways import _Way
from chitu.types import Role

ROW_S = 1e-3


class ImageFleet(Fleet):
    """With instances that encode."""

    seeds = itertools.count(1000)

    def __init__(self, num_encoders: int, *others: InstanceInfo, **config: Any) -> None:
        others = others or (info(Role.PREFILL, 0, image_port=7), info(Role.DECODE, 0))
        super().__init__(*others, *(encoder(rank) for rank in range(num_encoders)), **config)
        for each in others:
            self.report(each.name)

    def __getitem__(self, name: str) -> Any:
        return self.members[InstanceKey(Role.ENCODE, int(name[1:]), 1)] if name[0] == "E" else super().__getitem__(name)

    def tell(self, name: str, rows: int = 0, row_s: float = ROW_S, keys: tuple[int, ...] = (), **fields: Any) -> None:
        """Have an instance report what it has to do for images."""
        held = b"".join(key_of(key)[-REPORTED_KEY_BYTES:] for key in keys)
        self.report(name, image_load=ImageLoad(rows, row_s, keys=held), **fields)

    def way(self, *images: ImagePart, num_tokens: int = 1000, seed: int = 0, **options: Any) -> Way:
        """Choose for a prompt with these images, a new one unless it has a `seed`."""
        seed = seed or next(self.seeds)
        return self.selector.select(prompt(num_tokens, seed), images=images, **options)

    def chosen(self, *images: ImagePart, **options: Any) -> tuple[int, ...]:
        return self.way(*images, **options).encoders

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)


def encoder(rank: int, **fields: Any) -> InstanceInfo:
    return InstanceInfo(Role.ENCODE, rank, 1, fields.pop("host", "10.0.0.1"), 1, 2, FEATURES, 100_000, **fields)


def preferred(name: int, *ranks: int) -> int:
    return max(ranks, key=lambda rank: encoder_preference(key_of(name), rank))


# ------------------------------------------------------------------------------------------------------------- choice


def test_without_e_nobody_is_named() -> None:
    assert ImageFleet(0).chosen(image(1, 0, 100)) == ()
    assert ImageFleet(2, info(Role.PREFILL, 0), info(Role.DECODE, 0)).chosen(image(1, 0, 100)) == (), "it asks no E"


def test_equal_e_get_the_images_that_a_hash_of_the_key_prefers() -> None:
    fleet = ImageFleet(3)
    for name in range(1, 9):
        assert fleet.chosen(image(name, 0, 100)) == (preferred(name, 0, 1, 2),)
        fleet.pass_s(ON_ITS_WAY_S + 60)


def test_the_least_loaded_e_is_asked_by_time_not_by_rows() -> None:
    fleet = ImageFleet(2)
    fleet.tell("P0", rows=10_000)
    fleet.tell("E0", rows=500)
    fleet.tell("E1", rows=400, row_s=2 * ROW_S)
    assert fleet.chosen(image(1, 0, 100)) == (0,)
    fleet.tell("E0", rows=900)
    assert fleet.chosen(image(2, 0, 100)) == (1,)


def test_the_e_that_has_the_image_is_asked_whatever_waits_there() -> None:
    fleet = ImageFleet(3)
    fleet.tell("E2", rows=5000, keys=(7, 1, 9))
    assert fleet.chosen(image(1, 0, 100)) == (2,)
    assert fleet.chosen(image(2, 0, 100)) != (2,)


def test_a_key_is_not_found_across_two_others() -> None:
    one, other = key_of(1)[-8:], b"\1" * 8
    load = ImageLoad(keys=b"\0" * 4 + one + other[:4] + other)
    assert not load.has(b"\0" * 8 + one) and load.has(b"\0" * 8 + other)
    assert not ImageLoad().has(key_of(1))


def test_images_of_a_prompt_go_to_several_e_and_equal_ones_to_one() -> None:
    fleet = ImageFleet(2)
    found = fleet.chosen(image(1, 0, 100), image(2, 100, 100), image(1, 200, 100), image(3, 300, 200))
    assert found[0] == found[2] != found[1] and set(found) == {0, 1}


def test_what_was_sent_counts_until_a_report_shows_it() -> None:
    fleet = ImageFleet(2)
    first = fleet.chosen(image(1, 0, 300))
    assert fleet.chosen(image(2, 0, 300)) == (1 - first[0],)
    assert fleet.chosen(image(1, 0, 300)) == first, "it is encoded there once, although nothing says yet that it is"
    name, other = f"E{first[0]}", f"E{1 - first[0]}"
    fleet.tell(name, keys=(1,))
    fleet.tell(other, rows=300)
    assert fleet.chosen(image(3, 0, 10)) == first, "what its report shows as done waits there no more"
    fleet.tell(other)
    fleet.pass_s(60)
    fleet.tell(name, rows=1)
    assert fleet.chosen(image(4, 0, 10)) == (1 - first[0],), "what no report ever showed is forgotten"


def test_p_encodes_if_all_e_take_longer_than_it_and_the_next_prompt_would_wait() -> None:
    fleet = ImageFleet(2)
    for rows, wanted in ((90, False), (150, True)):
        for name in ("E0", "E1"):
            fleet.tell(name, rows=rows)
        found = fleet.chosen(image(1, 0, 100))
        assert (found == (NO_ENCODER,)) is wanted, rows
        fleet.pass_s(60)
    fleet.tell("P0", rows=100)
    assert fleet.chosen(image(1, 0, 100)) != (NO_ENCODER,), "P has images to encode, too"
    fleet.pass_s(60)
    fleet.tell("P0", row_s=ROW_S / 100)
    for name in ("E0", "E1"):
        fleet.tell(name)
    assert fleet.chosen(image(1, 0, 100)) == (NO_ENCODER,), "a P that is that much faster is asked first"


def test_what_p_has_or_finds_in_its_pages_is_asked_of_nobody() -> None:
    fleet = ImageFleet(2, policy="prefix_affinity")
    fleet.tell("P0", keys=(1,))
    found = fleet.chosen(image(1, 0, 100), image(2, 900, 100))
    assert found[0] == ANY_ENCODER and found[1] in (0, 1)
    images = image(3, 0, 100), image(4, 900, 100)
    assert ANY_ENCODER not in fleet.chosen(*images, seed=2)
    found = fleet.chosen(*images, seed=2)
    assert found[0] == ANY_ENCODER != found[1], "the first is in pages that P was sent before"


def test_an_e_that_drains_or_has_other_weights_or_is_lost_is_not_named() -> None:
    fleet = ImageFleet(1)
    assert fleet.chosen(image(1, 0, 100)) == (0,)
    instances = (info(Role.PREFILL, 0, image_port=7), info(Role.DECODE, 0), encoder(0, draining=True))
    fleet.members.on_view(ClusterView(1, 2, instances))
    assert fleet.chosen(image(1, 0, 100)) == ()
    fleet.members.on_view(ClusterView(1, 3, (*instances[:2], encoder(0))))
    assert fleet.chosen(image(1, 0, 100)) == (0,)
    fleet.members.remove(InstanceKey(Role.ENCODE, 0, 1))
    assert fleet.chosen(image(1, 0, 100)) == ()


def test_text_names_nobody_and_sends_what_it_did() -> None:
    fleet = ImageFleet(2)
    assert fleet.selector.select(prompt(1000)).encoders == ()
    world = World(Role.PREFILL, Role.DECODE)
    _, room = world.add()
    assert all(half.head.encoders == () for half in world.sent_to(room).values())


def test_both_halves_name_the_e_and_a_retry_chooses_again() -> None:
    world = World(Role.PREFILL, Role.DECODE, Role.DECODE)
    world.instances[0] = msgspec.structs.replace(world.instances[0], image_port=7)
    world.instances.append(e := encoder(4))
    world.router.on_joined(e)
    world.router.on_view(ClusterView(1, 9, tuple(world.instances)))
    generation, room = world.add(images=(image(1, 0, 2),), files={key_of(1): b"one"})
    assert {half.head.encoders for half in world.sent_to(room).values()} == {(4,)}
    world.router.on_lost(e, "killed", True)
    world.fails(world.pair(generation)[-2:], room, "transfer_failed")
    assert {half.head.encoders for half in world.sent_to(world.room(generation)).values()} == {()}


# --------------------------------------------------------------------------------------------------------------- cost


def seconds(fleet: ImageFleet, *images: ImagePart, num_tokens: int = 1000) -> float:
    """Return by how much the images delay the first token of a prompt that P0 computes."""
    assert fleet.members.candidates
    way = _Way(fleet["P0"].load, fleet["D0"].load, num_tokens)
    return fleet.selector._plan_images(way, num_tokens, images, fleet.clock.monotonic()).seconds


def test_the_cost_of_e_is_its_queue_and_the_image_less_the_text_before_and_the_bytes() -> None:
    fleet = ImageFleet(1, slo=SLOConfig(ttft_s=50.0, tpot_s=5.0))
    moved_s = 400 * ROW_BYTES / HOST_BYTES_PER_S
    fleet.tell("E0", rows=200)
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(0.6 + moved_s)
    fleet.pass_s(60)
    fleet.report("P0")
    # 500 tokens of text at 1e-4 s are computed meanwhile.
    assert seconds(fleet, image(1, 500, 400)) == pytest.approx(0.55 + moved_s)
    fleet.pass_s(60)
    fleet.report("P0", waiting_tokens=1000)  # P asks in 0.1 s
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(0.5 + moved_s)
    fleet.pass_s(60)
    fleet.report("P0")
    fleet.tell("E0", rows=200, keys=(1,))
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(moved_s)
    path = PathLoad(0, "shm", writes=9, bytes=1 << 30, busy_s=4.0)
    fleet.tell("E0", keys=(1,), paths=(path,))
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(400 * ROW_BYTES * 4 / (1 << 30))


def test_p_that_encodes_itself_costs_its_own_rate_and_an_unknown_rate_is_that_of_others() -> None:
    fleet = ImageFleet(0, slo=SLOConfig(ttft_s=50.0, tpot_s=5.0))
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(400 * PRIOR_ROW_S)
    fleet.tell("P0", rows=100, row_s=2e-3)
    assert seconds(fleet, image(1, 500, 400)) == pytest.approx(1.0), "the text before is not computed meanwhile"
    fleet = ImageFleet(1)
    fleet.tell("E0", rows=4000)
    assert seconds(fleet, image(1, 0, 400)) == pytest.approx(400 * ROW_S), "P has E's rate until it has its own"


def test_a_way_with_an_idle_e_is_taken_before_one_that_encodes_itself() -> None:
    """U0 asks no E. P0 does, and E has the image."""
    fleet = ImageFleet(1, info(Role.PREFILL, 0, image_port=7), info(Role.DECODE, 0), info(Role.UNIFIED, 0))
    fleet.tell("E0", keys=(1,))
    for waiting, prompt_goes, image_goes in ((0, "U0", "P0-D0"), (2000, "U0", "P0-D0"), (6000, "U0", "U0")):
        fleet.report("P0", waiting_tokens=waiting)
        assert fleet.name(fleet.way()) == prompt_goes
        assert fleet.name(fleet.way(image(1, 0, 400))) == image_goes, waiting
        fleet.pass_s(60)


def test_an_image_that_breaks_the_slo_on_one_way_moves_the_request_to_another() -> None:
    """The streams of D0 make the pair dearer. U0 is cheaper, but its own encoding takes longer than the SLO allows."""
    others = info(Role.PREFILL, 0, image_port=7), info(Role.DECODE, 0), info(Role.UNIFIED, 0)
    for ttft_s, image_goes in ((0.45, "P0-D0"), (9.0, "U0")):
        fleet = ImageFleet(1, *others, slo=SLOConfig(ttft_s=ttft_s))
        fleet.tell("E0", keys=(1,))
        fleet.report("D0", running=30)
        assert fleet.name(fleet.way()) == "U0"
        assert fleet.name(fleet.way(image(1, 0, 400))) == image_goes


# ------------------------------------------------------------------------------------------------------ E and P report


def test_e_reports_rows_that_wait_its_rate_hits_and_the_images_that_it_has() -> None:
    world = EncodeWorld(1)
    e = world.encoders[0]
    assert e.scheduler.load.image_load == ImageLoad()
    e.is_slow = True
    world.p.submit(0, text(0, 30), (image(1, 6, 6), image(2, 14, 7)))
    for _ in range(5):
        world.turn()
    assert e.scheduler.load.image_load.waiting_rows == 13
    world.clock.advance(2.6)
    e.is_slow = False
    world.run()
    load = e.scheduler.load.image_load
    assert (load.waiting_rows, load.hits) == (0, 0) and load.row_s == pytest.approx(0.2)
    assert load.has(key_of(1)) and load.has(key_of(2)) and not load.has(key_of(3))
    assert e.scheduler.load.backlog_s == pytest.approx(2.6)
    world.clock.advance(100.0)
    world.p.gate.store.drop_all()
    world.p.submit(1, text(1, 30), (image(1, 6, 6), image(2, 14, 7)))
    world.run()
    again = e.scheduler.load.image_load
    assert again.hits == 2 and again.row_s == load.row_s and e.scheduler.load.backlog_s == pytest.approx(2.6)
    assert world.p.scheduler.load.image_load == ImageLoad(keys=world.p.gate.store.newest_keys)
    world.check_empty()


def test_p_that_encodes_reports_its_rate_and_the_images_that_it_has() -> None:
    world = EncodeWorld(0)
    gate = world.p.gate
    world.p.submit(0, text(0, 30), (image(1, 6, 6), image(2, 14, 7)))
    world.run(step_s=0.5)
    load = world.p.scheduler.load.image_load
    assert load.waiting_rows == 0 and load.row_s == pytest.approx(0.5 / 13, rel=0.5)
    assert load.has(key_of(1)) and load.has(key_of(2))
    gate.forget()
    assert not gate.load.has(key_of(1))
    world.check_empty()


def test_a_report_has_the_images_that_were_used_last() -> None:
    store = FeatureStore(2 * MAX_REPORTED_KEYS)
    for name in range(2 * MAX_REPORTED_KEYS):
        store.reserve(key_of(name), 1)
    store.find(key_of(0))
    load = ImageLoad(keys=store.newest_keys)
    assert len(load.keys) == MAX_REPORTED_KEYS * REPORTED_KEY_BYTES
    assert load.has(key_of(0)) and not load.has(key_of(1)) and load.has(key_of(2 * MAX_REPORTED_KEYS - 1))


def test_the_page_gets_what_an_e_has_to_do_without_the_keys() -> None:
    log, load = ChangeLog(), LoadReport(image_rows=64, image_load=ImageLoad(30, 0.123456, 2, bytes(24)))
    log.observe([InstanceSnapshot("E0", "encode", "up", "h", 1, "1", load)], [])
    (shown,) = msgspec.json.decode(log.instances_after(0))
    assert shown["load"]["image_load"] == {"waiting_rows": 30, "row_s": 0.123, "hits": 2}
    log.observe([InstanceSnapshot("D0", "decode", "up", "h", 1, "1", LoadReport(tokens=3))], [])
    assert "image_load" not in msgspec.json.decode(log.instances_after(0))[0]["load"]


# ------------------------------------------------------------------------------------------------ P follows the choice


def ask(world: EncodeWorld, index: int, images: tuple[ImagePart, ...], *encoders: int) -> None:
    world.p.submit(index, text(index, 30), images, encoders=encoders)
    world.run()
    world.p.check(index, text(index, 30), images)


def test_p_asks_the_e_that_the_router_named() -> None:
    world = EncodeWorld(3)
    images = image(1, 6, 6), image(2, 14, 7), image(4, 22, 5)
    ask(world, 0, images, 2, 0, 2)
    assert [sorted(each.tower.encoded) for each in world.encoders] == [[key_of(2)], [], [key_of(1), key_of(4)]]
    world.check_empty()


def test_p_encodes_what_the_router_gives_it_and_asks_the_rest() -> None:
    world = EncodeWorld(2)
    ask(world, 0, (image(1, 6, 6), image(2, 14, 7)), NO_ENCODER, 1)
    assert world.p.executor.encoded == [key_of(1)] and world.encoders[1].tower.encoded == [key_of(2)]
    ask(world, 1, (image(3, 6, 6),), ANY_ENCODER)
    assert len(encoded(world)) == 2 and len(world.p.executor.encoded) == 1
    world.check_empty()


def test_an_e_that_is_named_and_gone_or_refuses_is_replaced() -> None:
    world = EncodeWorld(2)
    ask(world, 0, (image(1, 6, 6),), 9)
    assert encoded(world) == [key_of(1)], "nobody has rank 9: another E is asked"
    world.encoders[0].scheduler.drain()
    ask(world, 1, (image(2, 6, 6),), 0)
    assert world.encoders[1].tower.encoded[-1] == key_of(2) and world.pulls.num_failed == 1
    world.check_empty()


def test_a_request_with_another_number_of_e_than_images_is_refused() -> None:
    world = EncodeWorld(1)
    world.p.submit(0, text(0, 30), (image(1, 6, 6),), encoders=(0, 0))
    world.run()
    assert "2 E are named for 1 images" in world.p.finishes[room_of(0)].message
    world.check_empty()
