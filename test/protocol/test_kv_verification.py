"""`verify_kv`: KV that differs from what P wrote never becomes SUCCESS, whatever broke it; right KV is not delayed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from pd_node import DEADLINES, NUM_LAYERS, PAGE_BYTES
from pd_world import Pair
from support.fake_transport import Fault, FaultKind

from chitu.errors import Integrity, TransferTimeout
from chitu.kv_transfer.both_sides import TransferEventKind as Kind
from chitu.kv_transfer.layout import VerifyKV
from chitu.types import Role

NUM_TOKENS = 18
"""Prompt length: five pages, the last one half full."""


def compute(pair: Pair) -> None:
    """Compute and write everything, without delivering Success to D."""
    while pair.p.requests[pair.room].computed < NUM_TOKENS:
        pair.p.compute()
    while pair.p.sender.queue.run_one():
        pass


def arrived(verify_kv: VerifyKV, harm: Callable[[np.ndarray], None] = lambda pages: None, seed: int = 1) -> Pair:
    """Return a pair for which everything landed and P reported Success; then `harm` changes D's pages (`[region,
    position, bytes]`)."""
    pair = Pair(seed, verify_kv).join()
    pair.both_halves(NUM_TOKENS)
    compute(pair)
    kv, pages = pair.d.memory.kv, pair.d.requests[pair.room].pages
    own = kv[:, pages]
    harm(own)
    kv[:, pages] = own
    while pair.world.frames:
        pair.world.deliver_one()
    pair.p.poll()
    pair.d.poll()
    return pair


def flip(pages: np.ndarray) -> None:
    pages[3, 1, 5] ^= 0x10


def zero(pages: np.ndarray) -> None:
    pages[2, 4] = 0


def swap(pages: np.ndarray) -> None:
    pages[:, [0, 3]] = pages[:, [3, 0]]


def stale(pages: np.ndarray) -> None:
    pages[:, 2] = np.arange(PAGE_BYTES, dtype=np.uint8)


@pytest.mark.parametrize("harm", [flip, zero, swap, stale])
def test_pages_that_are_not_what_p_wrote_are_an_integrity_failure_and_come_back(
    harm: Callable[[np.ndarray], None], caplog: pytest.LogCaptureFixture
) -> None:
    pair = arrived("all", harm)
    assert pair.seen(pair.d) == [Kind.LOGITS_READY]
    pair.pump()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.FAILED, Kind.RELEASED]
    assert isinstance(pair.error(pair.d), Integrity)
    assert "D0 rejects the data of P0" in caplog.text and "written over fake" in caplog.text
    pair.world.settle_down()
    pair.world.check_all_returned()


@pytest.mark.parametrize("harm", [flip, zero, swap, stale])
def test_without_verification_the_same_harm_becomes_wrong_kv_of_the_request(
    harm: Callable[[np.ndarray], None],
) -> None:
    with pytest.raises(AssertionError, match=r"token .* of region .* is wrong"):
        arrived("off", harm)


@pytest.mark.parametrize("verify_kv", ["off", "sample", "all"])
def test_a_byte_that_the_transport_flips(verify_kv: VerifyKV) -> None:
    """The byte is on the first page, which every sample includes."""
    pair = Pair(verify_kv=verify_kv).join()
    pair.both_halves(NUM_TOKENS)
    pair.world.fabric.on_write = lambda peer, copies: (
        pair.world.fabric.inject(Fault(FaultKind.CORRUPT, byte=2))
        if pair.d.memory.region_bases[0] + pair.d.requests[pair.room].pages[0] * PAGE_BYTES == copies.dst[0]
        else None
    )
    if verify_kv == "off":
        with pytest.raises(AssertionError, match="token 0 of region 0 is wrong"):
            pair.compute_all()
    else:
        pair.compute_all()
        assert isinstance(pair.error(pair.d), Integrity) and Kind.SUCCESS not in pair.seen(pair.d)


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("verify_kv", ["sample", "all"])
def test_what_is_right_succeeds_once_it_was_looked_at(verify_kv: VerifyKV, seed: int) -> None:
    """The seed decides the maximum size of a write, so layers are written one by one or several at once."""
    pair = arrived(verify_kv, seed=seed)
    assert pair.seen(pair.p)[-1] is Kind.SUCCESS, "P's pages are not kept for it"
    assert pair.seen(pair.d) == [Kind.LOGITS_READY]
    assert pair.d.verify_one() and not pair.d.verify_one()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_a_success_that_p_repeats_is_acknowledged_and_verified_once() -> None:
    pair = Pair(verify_kv="all").join()
    pair.both_halves(NUM_TOKENS)
    compute(pair)
    (success,) = [frame for frame in pair.world.frames if b"kv_sums" in frame.payload]
    for _ in range(3):
        pair.d.kv.side.on_frame(success.room, success.payload)
    acks = [frame for frame in pair.world.frames if b"status_ack" in frame.payload]
    assert len(acks) == 3
    assert pair.d.verify_one() and not pair.d.verify_one()


def test_a_deadline_or_an_abort_during_verification_ends_the_room_without_asking_p() -> None:
    """P has already reported that it writes no more."""
    pair = arrived("all")
    pair.world.clock.advance(DEADLINES.transfer_s)
    pair.d.receiver.tick(pair.world.clock.monotonic())
    assert isinstance(pair.error(pair.d), TransferTimeout)
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.FAILED, Kind.RELEASED] and not pair.world.frames
    assert pair.d.verify_one()
    pair.d.poll()

    pair = arrived("all")
    pair.d.abort(pair.room)
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.RELEASED] and not pair.world.frames
    assert pair.d.verify_one()
    pair.d.poll()


def test_the_death_of_p_after_its_success_costs_nothing() -> None:
    pair = arrived("all")
    pair.world.kill(pair.p)
    pair.world.publish_view()
    pair.d.poll()
    assert pair.d.verify_one()
    pair.d.poll()
    assert pair.seen(pair.d) == [Kind.LOGITS_READY, Kind.SUCCESS]


def test_d_insists_on_checksums_that_its_configuration_asks_for() -> None:
    pair = Pair(verify_kv="off")
    pair.world.verify_kv = "all"
    decode = pair.d
    pair.world.restart(decode)
    pair.d = pair.world.of(Role.DECODE)[0]
    pair.join()
    pair.both_halves(NUM_TOKENS)
    pair.compute_all()
    error = pair.error(pair.d)
    assert isinstance(error, Integrity) and "P sent no KV checksums" in str(error)
    assert pair.seen(pair.d)[-1] is Kind.RELEASED


def test_p_sums_up_each_chosen_page_once_per_layer_and_a_sample_is_a_part_of_them() -> None:
    units: dict[str, int] = {}
    modes: list[VerifyKV] = ["off", "sample", "all"]
    for mode in modes:
        pair = Pair(verify_kv=mode).join()
        pair.both_halves(60)
        pair.compute_all()
        assert pair.seen(pair.d)[-1] is Kind.SUCCESS
        units[mode] = pair.p.page_sums.num_units
        assert pair.d.page_sums.num_units == units[mode]
    assert units["off"] == 0 and units["all"] == 15 * NUM_LAYERS
    assert units["sample"] in (2 * NUM_LAYERS, 3 * NUM_LAYERS)


def test_verification_on_its_own_thread_does_not_hold_up_the_comm_thread() -> None:
    """While the verifier stands still, frames are still processed; the verdict comes when it goes on."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(10)

    pair = Pair(verify_kv="all").join()
    pair.both_halves(NUM_TOKENS)
    compute(pair)
    pair.d.page_sums.meanwhile = hold
    pair.d.receiver.start()
    try:
        while pair.world.frames:
            pair.world.deliver_one()
        assert begun.wait(10)
        pair.d.receiver.tick(pair.world.clock.monotonic())
        pair.d.kv.side.on_frame(pair.room, b"nonsense")
        assert pair.d.receiver.unknown_frames == 1
        pair.d.poll()
        assert pair.seen(pair.d) == [Kind.LOGITS_READY]
        pair.d.wake = done.set
        go_on.set()
        assert done.wait(10), "the step thread is woken"
        pair.d.poll()
        assert pair.seen(pair.d)[-1] is Kind.SUCCESS
    finally:
        go_on.set()
        pair.d.receiver.close()


@pytest.mark.parametrize("verify_kv", ["off", "sample"])
def test_a_request_that_asks_gets_the_checksums_of_both_sides_by_layer(verify_kv: VerifyKV) -> None:
    """With `verify_kv` off a page that differs is reported, and the request goes on."""
    pair = Pair(verify_kv=verify_kv).join()
    pair.both_halves(NUM_TOKENS, page_sums=True)
    compute(pair)
    kv, pages = pair.d.memory.kv, pair.d.requests[pair.room].pages
    changes: list[int] = [] if verify_kv == "sample" else [3]
    for region in changes:
        kv[region, pages[2], 5] ^= 0x10
    while pair.world.frames:
        pair.world.deliver_one()
    assert pair.d.verify_one()
    (event,) = [event for event in pair.d.receiver.poll() if event.kind is Kind.SUCCESS]
    sums = event.sums
    assert sums is not None and (sums.first_page, sums.layers) == (0, NUM_LAYERS)
    assert len(sums.sent) == len(sums.landed) == 8 * 5 * NUM_LAYERS
    unlike = [n for n in range(5 * NUM_LAYERS) if sums.sent[8 * n : 8 * n + 8] != sums.landed[8 * n : 8 * n + 8]]
    assert unlike == [5 * (region // 2) + 2 for region in changes], "the page, and the layer of its region"


def test_without_being_asked_nobody_computes_a_checksum() -> None:
    pair = arrived("off")
    assert not [frame for frame in pair.world.frames if b"kv_sums" in frame.payload] and not pair.d.verify_one()
