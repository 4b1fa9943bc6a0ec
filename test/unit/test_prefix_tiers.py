"""The prefix cache extends into host memory: KV of real bytes, small pools, and every token depends on every byte.

The test runs the jobs of the thread `tiers` one at a time, between the steps, at moments that a seed picks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scheduler_world import PAGE_SIZE, Instance, PSide, Wire, prompt_of, room_of
from support.requests import decode_request, prefill_request
from tiered_world import TIMEOUT_S, Engine, MemoryStore, Stored, Tiered, TieredPair, names_of, prompt_bytes

from chitu.config.schema import CacheConfig, StoreConfig
from chitu.errors import ConfigError
from chitu.instance.sequences import SequenceState
from chitu.kv_cache.tiers.disk_pages import DiskPages
from chitu.kv_cache.tiers.pages import HEADER_BYTES, MEMORY_S, PageStore, StoreError
from chitu.kv_cache.tiers.prefix_tiers import DECODE_HOST_BYTES, OFF_S, PIECE_PAGES, decode_cache
from chitu.kv_transfer.both_sides import TransferEvent, TransferEventKind
from chitu.protocol import CancelRequest, SamplingParams, pack_i32


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_pool_evicted_comes_back_from_host_memory(overlap: bool) -> None:
    instance = Tiered(16, overlap=overlap)
    prompt = prompt_of(1, 41)
    assert instance.ask(0, prompt) == 0
    instance.evict()
    before = instance.scheduler._load.prompt_tokens
    assert instance.ask(1, prompt) == 40
    assert instance.scheduler._load.prompt_tokens - before == 1
    assert instance.tiers.hit_pages == 10 and instance.woken
    assert instance.ask(2, prompt) == 40 and instance.tiers.hit_pages == 10  # it is in the pool again
    instance.check_empty()


def test_pages_of_the_pool_go_before_and_the_last_token_is_computed() -> None:
    instance = Tiered(16)
    prompt = prompt_of(1, 40)
    instance.ask(0, prompt)
    instance.evict()
    instance.ask(1, prompt[:21])
    assert instance.copies.restored == instance.copies.restored[:5]
    assert instance.ask(2, prompt) == 36
    assert instance.tiers.hit_pages == 9  # 5 for the first prompt, the 4 after them for the second


def test_answers_come_back_too() -> None:
    instance = Tiered(16)
    prompt = prompt_of(1, 22)
    instance.ask(0, prompt)
    instance.evict()
    longer = [*prompt, *instance.tokens[room_of(0)], 9]
    assert instance.ask(1, longer) == 24  # K and V of 22 + 2 tokens were computed


def test_random_requests_have_the_tokens_of_a_run_without_any_cache() -> None:
    """Prompts fork, a pool and host memory hold a part of them, jobs run at random moments, and some requests are
    cancelled and the cache flushed now and then."""
    hits = evictions = 0
    for seed in range(20):
        rng = random.Random(seed)
        instance = Tiered(24, host_pages=rng.choice((3, 12, 40)), overlap=bool(seed % 2))
        prompts = [prompt_of(rng.randrange(3), rng.randrange(1, 60)) for _ in range(24)]
        waiting = list(enumerate(prompts))
        cancelled = set()
        for _ in range(3000):
            if waiting and rng.random() < 0.3:
                index, prompt = waiting.pop(0)
                instance.submit(index, prompt, rng.choice(("", "", "mine", None)))
                if rng.random() < 0.15:
                    cancelled.add(index)
            if cancelled and rng.random() < 0.2:
                instance.scheduler.submit(CancelRequest(room_of(rng.choice(sorted(cancelled)))))
            if rng.random() < 0.01:
                instance.scheduler.flush_cache()
            if rng.random() < 0.05:
                instance.clock.advance(TIMEOUT_S / 2)
            for _ in range(rng.randrange(3)):
                instance.tiers.run_one()
            instance.step()
            if not waiting and instance.scheduler.is_idle:
                break
        instance.run()
        for index, prompt in enumerate(prompts):
            if room_of(index) in instance.finishes and index not in cancelled:
                instance.check(index, prompt)
        assert len(instance.finishes) + len(cancelled) >= len(prompts)
        instance.check_empty()
        hits += instance.tiers.hit_pages
        evictions += instance.host.evictions
    assert hits > 25 and evictions > 50


def test_a_page_that_goes_to_others_while_it_is_copied_is_not_kept() -> None:
    """The copy has bytes of the next owner in it."""
    instance = Tiered(16)
    prompt = prompt_of(1, 41)
    extract = instance.copies.extract_from_kvpool

    def evicted_meanwhile(page: int, content: memoryview) -> None:
        if len(instance.copies.extracted) == 3:
            instance.evict()
        extract(page, content)

    instance.submit(0, prompt)
    while not instance.scheduler.is_idle:
        instance.step()
    instance.copies.extract_from_kvpool = evicted_meanwhile  # type: ignore[method-assign]
    instance.pump()
    assert len(instance.copies.extracted) == 4 and len(instance.host) == 3
    assert instance.ask(1, prompt) == 3 * PAGE_SIZE


def test_a_flush_forgets_what_is_there_and_what_is_on_its_way() -> None:
    instance = Tiered(16)
    prompt = prompt_of(1, 41)
    instance.submit(0, prompt)
    while not instance.scheduler.is_idle:
        instance.step()
    instance.scheduler.flush_cache()
    instance.step()
    instance.pump()  # the copies were requested before the flush
    assert len(instance.host) == 0
    instance.ask(1, prompt)
    instance.evict()
    instance.submit(2, prompt)
    instance.step()
    instance.tiers.run_one()  # marks pages as used
    instance.pump()
    assert instance.tiers.hit_pages == 10
    instance.scheduler.flush_cache()  # loaded, but not taken yet
    instance.run()
    instance.check(2, prompt)
    assert instance.cached.get(room_of(2), 0) == 0
    instance.check_empty()


@pytest.mark.parametrize("fate", ["in time", "late", "cancelled"])
def test_a_load_is_waited_for_until_its_deadline(fate: str) -> None:
    instance = Tiered(32)
    prompt, other = prompt_of(1, 41), prompt_of(2, 30)
    instance.ask(0, prompt)
    instance.evict()
    instance.submit(1, prompt)
    instance.submit(2, other, None)
    for _ in range(12):  # the other request is computed meanwhile
        instance.step()
    instance.check(2, other)
    assert room_of(1) not in instance.tokens and instance.scheduler.load.running == 1
    if fate == "cancelled":
        instance.scheduler.submit(CancelRequest(room_of(1)))
        instance.step()
        assert instance.scheduler.is_idle
    elif fate == "late":
        instance.clock.advance(TIMEOUT_S)
        instance.step()
    restored = list(instance.copies.restored)
    instance.pump()
    assert instance.copies.restored == restored or fate == "in time", "a write after the pages went on"
    instance.run()
    if fate != "cancelled":
        instance.check(1, prompt)
        assert instance.cached.get(room_of(1), 0) == (40 if fate == "in time" else 0)
    instance.check_empty()


def test_what_is_slower_than_computing_is_not_loaded() -> None:
    instance = Tiered(16)
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    instance.tiers.note_prefill(10**9, 1.0)
    instance.tiers._restore_speed.note(instance.host.record_bytes, 1.0)
    instance.evict()
    assert instance.ask(1, prompt) == 0
    instance.evict()
    instance.clock.advance(MEMORY_S)  # a tier that was slow once is tried again
    assert instance.ask(2, prompt) == 40


def test_a_write_back_lets_loads_go_ahead() -> None:
    """A long prompt's pages are copied in pieces."""
    instance = Tiered(48)
    prompt = prompt_of(1, 4 * PIECE_PAGES * PAGE_SIZE + 1)
    other = prompt_of(0, 21)
    instance.ask(0, other)
    instance.evict()
    instance.cache.reserve(room_of(5), len(prompt) * 1)
    keys = instance.cache.page_keys("")
    instance.cache.commit(room_of(5), keys, pack_i32(prompt), len(prompt))
    instance.submit(1, other)
    instance.step()
    extracted = len(instance.copies.extracted)
    for _ in range(3):
        instance.tiers.run_one()
    assert instance.copies.restored and len(instance.copies.extracted) - extracted <= 2 * PIECE_PAGES
    instance.cache.remove_task(room_of(5))
    instance.run()
    instance.check(1, other)


def test_p_loads_and_d_gets_what_it_lacks() -> None:
    pair = TieredPair(lambda wire: Tiered(16, sender=wire), lambda wire: Instance(64, receiver=wire, executor=Engine))
    prompt = prompt_of(1, 41)
    pair.ask(0, prompt)
    pair.prefill.pump()
    pair.prefill.evict()
    pair.decode.scheduler.flush_cache()
    pair.ask(1, prompt)
    assert pair.prefill.tiers.hit_pages == 10
    pair.prefill.check_empty()
    pair.decode.check_empty()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_speculation_that_gives_way_while_it_loads_starts_anew(is_loaded: bool) -> None:
    """Its pages go to an announced request, and are loaded again when there are free ones. `is_loaded`: it could have
    started in that very turn."""
    wire = Wire()
    side = PSide(wire)
    instance = wire.prefill = Tiered(16, sender=side)
    prompt, urgent = prompt_of(1, 41), prompt_of(2, 50)

    def ask(index: int, tokens: list[int]) -> None:
        room = room_of(index)
        instance.scheduler.submit(prefill_request(room, f"r{index}", pack_i32(tokens), 0, 1, cache_salt=""))
        while index != 1 and room not in wire.computed:
            instance.pump()
            instance.step()

    def finish(index: int) -> None:
        side.abort(room_of(index), ConfigError("over"))
        wire.computed.pop(room_of(index), None)
        instance.step()

    ask(0, prompt)
    finish(0)
    instance.evict()
    ask(1, prompt)
    instance.step()
    speculating = instance.scheduler._sequences.of(SequenceState.COMPUTING)[room_of(1)]
    load = speculating.holds.load
    assert load is not None
    if is_loaded:
        instance.pump()
    assert load.is_done is is_loaded
    wire.announced[room_of(2)] = 0
    instance.scheduler.submit(prefill_request(room_of(2), "r2", pack_i32(urgent), 0, 1, cache_salt=""))
    wire.requested.add(room_of(2))
    instance.step()
    wire.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room_of(2)))
    instance.step()
    assert room_of(2) in instance.scheduler._sequences.of(SequenceState.COMPUTING) and load.is_stopped
    while room_of(2) not in wire.computed:
        instance.pump()
        instance.step()
    finish(2)
    while room_of(1) not in wire.computed:
        instance.pump()
        instance.step()
    assert speculating.prompt.cached_tokens == 40
    finish(1)
    instance.run()
    instance.check_empty()


def test_speculation_that_gave_way_computed_and_ends_while_it_loads_releases_no_slot_twice() -> None:
    """The executor knows nothing of a sequence that loads: its slot was released when it was computed before."""
    wire = Wire()
    side = PSide(wire)
    instance = wire.prefill = Tiered(16, sender=side)

    def ask(index: int, length: int, is_announced: bool) -> None:
        if is_announced:
            wire.announced[room_of(index)] = 0
        tokens = pack_i32(prompt_of(index, length))
        instance.scheduler.submit(prefill_request(room_of(index), f"r{index}", tokens, 0, 1, cache_salt=""))
        wire.requested.add(room_of(index))
        instance.step()
        if is_announced:
            wire.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room_of(index)))

    def compute(index: int) -> None:
        while room_of(index) not in wire.computed:
            instance.pump()
            instance.step()

    def finish(index: int) -> None:
        side.abort(room_of(index), ConfigError("over"))
        instance.step()

    ask(1, 41, is_announced=False)
    compute(1)
    instance.pump()
    ask(2, 50, is_announced=True)
    compute(2)
    assert room_of(1) in instance.scheduler._sequences.of(SequenceState.WAITING)
    finish(2)
    instance.step()
    again = instance.scheduler._sequences.of(SequenceState.COMPUTING)[room_of(1)]
    assert again.holds.load is not None and again.slot >= 0
    finish(1)
    ask(3, 9, is_announced=True)
    compute(3)
    finish(3)
    instance.run()
    instance.check_empty()


def test_what_host_memory_has_is_no_work_to_do() -> None:
    instance = Tiered(num_pages=16)
    prompt = [20 + n for n in range(33)]
    instance.ask(1, prompt)
    instance.evict()
    instance.submit(2, prompt)
    instance.step()  # it is admitted and loads
    assert instance.scheduler.load.waiting_tokens == 1
    instance.run()
    assert instance.scheduler.load.cached_share > 0.4 and instance.scheduler._load.loaded_tokens == 0


def test_what_comes_from_a_store_was_work_to_do_and_is_work_done() -> None:
    instance = Stored({"store": MemoryStore()})
    prompt = [20 + n for n in range(33)]
    instance.ask(1, prompt)
    instance.evict()
    instance.submit(2, prompt)
    instance.step()
    assert instance.scheduler.load.waiting_tokens == 33, "nobody knows yet what the store has"
    instance.run()
    assert instance.cached[room_of(2)] == instance.scheduler._load.loaded_tokens == 32


# ----------------------------------------------------------------------------------------------------------------------
# Behind host memory: pages on disk outlive an instance; a store that is slow, broken, lost or wrong is a miss.


FOREVER = 1 << 40


def test_what_host_memory_lost_comes_back_from_disk_and_after_a_restart_too(tmp_path: Path) -> None:
    prompt = prompt_of(1, 41)
    disk = DiskPages(tmp_path, FOREVER)
    instance = Stored({"disk": disk})
    instance.ask(0, prompt)
    instance.evict()
    assert instance.ask(1, prompt) == 40
    assert instance.slow["disk"].hit_pages == 10 and instance.tiers.hit_pages == 0
    instance.check_empty()
    disk.close()
    disk = DiskPages(tmp_path, FOREVER)
    again = Stored({"disk": disk})
    assert again.ask(0, prompt) == 40
    disk.close()
    other = Stored({"disk": DiskPages(tmp_path, FOREVER)})
    assert other.ask(0, prompt, "another salt") == 0


def test_a_chain_is_put_together_from_all_tiers(tmp_path: Path) -> None:
    """The first pages are in the pool, the rest in host memory, on disk and in a store."""
    store, disk = MemoryStore(), DiskPages(tmp_path, FOREVER)
    instance = Stored({"disk": disk, "store": store})
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    names = instance.cache.page_keys("").upto(10, prompt_bytes(prompt))  # type: ignore[union-attr]
    instance.evict()
    for key in names[6:]:
        disk.forget(key)
    instance.ask(1, prompt[:9])  # pool and host memory have two pages
    assert instance.ask(2, prompt) == 40
    assert (instance.slow["disk"].hit_pages, instance.slow["store"].hit_pages) == (2 + 4, 4)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_flipped_byte_is_a_miss_from_there_on_and_is_put_right(place: int) -> None:
    store = MemoryStore()
    instance = Stored({"store": store})
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    instance.evict()
    key = instance.cache.page_keys("").upto(10, prompt_bytes(prompt))[place]  # type: ignore[union-attr]
    store.records[key][HEADER_BYTES + 5] ^= 0x10
    assert instance.ask(1, prompt) == place * PAGE_SIZE
    assert instance.slow["store"].bad_pages == 1
    instance.evict()
    assert instance.ask(2, prompt) == 40, "the page that was computed again was not put there"
    instance.check_empty()


def test_another_page_under_its_key_is_a_miss() -> None:
    store = MemoryStore()
    instance = Stored({"store": store})
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    instance.evict()
    first, second = instance.cache.page_keys("").upto(2, prompt_bytes(prompt))  # type: ignore[union-attr]
    store.records[first] = bytearray(store.records[second])
    assert instance.ask(1, prompt) == 0


@pytest.mark.parametrize("error", [StoreError("no route"), OSError(28, "No space left on device")])
def test_a_store_that_fails_is_left_out_for_a_while(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    instance = Stored({"store": store})
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    instance.evict()
    store.error = error
    assert instance.ask(1, prompt) == 0
    assert "does not use store" in caplog.text
    calls = store.calls
    instance.evict()
    assert instance.ask(2, prompt) == 0 and store.calls == calls
    store.error = None
    instance.clock.advance(OFF_S)
    instance.evict()
    assert instance.ask(3, prompt) == 40
    instance.check_empty()


def test_a_call_that_hangs_costs_its_deadline_once_and_what_comes_late_is_dropped() -> None:
    """The scheduler steps in the middle of the call, as it does while another thread is in it."""
    store = MemoryStore()
    instance = Stored({"store": store})
    prompt, other = prompt_of(1, 41), prompt_of(2, 21)
    instance.ask(0, prompt)
    instance.evict()
    store.before_get = lambda: hang()
    seen = []

    def hang() -> None:
        instance.step()
        assert room_of(1) not in instance.tokens
        instance.clock.advance(TIMEOUT_S + 0.1)
        for index, tokens in ((1, prompt), (2, other)):  # the second does not even call the store
            if index == 2:
                instance.submit(index, tokens)
            while room_of(index) not in instance.finishes:
                instance.step()
            instance.check(index, tokens)
            seen.append(instance.cached.get(room_of(index), 0))

    instance.submit(1, prompt)
    instance.run()
    assert seen == [0, 0]
    assert not instance.copies.restored
    assert not instance.slow["store"].may_have(b"")
    instance.clock.advance(OFF_S)
    assert instance.slow["store"].may_have(b"")
    instance.check_empty()


def test_a_slow_store_is_not_asked_while_computing_is_faster() -> None:
    store = MemoryStore()
    instance = Stored({"store": store})
    prompt = prompt_of(1, 41)
    instance.ask(0, prompt)
    instance.evict()
    store.before_get = lambda: instance.clock.advance(TIMEOUT_S / 2)
    assert instance.ask(1, prompt) == 40  # its speed was not known yet
    instance.tiers.note_prefill(10**9, 1.0)
    instance.evict()
    assert instance.ask(2, prompt) == 0


def test_a_flush_clears_the_disk_and_what_was_to_be_put_there(tmp_path: Path) -> None:
    instance = Stored({"disk": DiskPages(tmp_path, FOREVER)})
    prompt = prompt_of(1, 41)
    instance.submit(0, prompt)
    while not instance.scheduler.is_idle:
        instance.step()
        instance.tiers._thread.run_one()  # to host memory, and no further
    assert len(instance.host) and not list(tmp_path.iterdir())
    instance.scheduler.flush_cache()
    instance.step()
    instance.pump()
    assert not list(tmp_path.iterdir())
    instance.ask(1, prompt)
    assert len(list(tmp_path.iterdir())) == 10
    instance.scheduler.flush_cache()
    instance.step()
    instance.pump()
    assert not list(tmp_path.iterdir())
    assert instance.ask(2, prompt) == 0


def test_random_requests_over_all_tiers_have_the_right_tokens(tmp_path: Path) -> None:
    """Each tier holds a part, records change, calls fail, and instances are replaced."""
    hits = {"disk": 0, "store": 0}
    for seed in range(7):
        rng = random.Random(seed)
        store = MemoryStore()
        for _ in range(2):
            disk = DiskPages(tmp_path / str(seed), 20 * (HEADER_BYTES + 256))
            instance = Stored({"disk": disk, "store": store}, num_pages=24, host_pages=rng.choice((4, 16)))
            prompts = [prompt_of(rng.randrange(3), rng.randrange(1, 60)) for _ in range(12)]
            waiting = list(enumerate(prompts))
            for _turn in range(3000):
                if waiting and rng.random() < 0.3:
                    instance.submit(*waiting.pop(0))
                if store.records and rng.random() < 0.1:
                    record = store.records[rng.choice(sorted(store.records))]
                    record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
                store.error = StoreError("away") if rng.random() < 0.02 else None
                if rng.random() < 0.1:
                    instance.clock.advance(TIMEOUT_S)
                if rng.random() < 0.02:
                    instance.scheduler.flush_cache()
                for _ in range(rng.randrange(4)):
                    instance.tiers.run_one()
                instance.step()
                if not waiting and instance.scheduler.is_idle:
                    break
            store.error = None
            instance.run()
            for index, prompt in enumerate(prompts):
                instance.check(index, prompt)
            instance.check_empty()
            assert disk.num_bytes == sum(path.stat().st_size for path in (tmp_path / str(seed)).iterdir())
            assert disk.num_bytes <= 20 * (HEADER_BYTES + 256)
            disk.close()
            for name, tier in instance.slow.items():
                hits[name] += tier.hit_pages
    assert min(hits.values()) > 5, hits


# ----------------------------------------------------------------------------------------------------------------------
# The way back: P gets what D computed through a store, so a turn computes only what is new.


def pair_over(prefill: PageStore, decode: PageStore) -> tuple[TieredPair, Stored]:
    pair = TieredPair(
        lambda wire: Stored({"store": prefill}, num_pages=64, sender=wire),
        lambda wire: Stored({"store": decode}, num_pages=64, receiver=wire),
    )
    assert isinstance(pair.decode, Stored)
    return pair, pair.decode


def test_p_computes_what_is_new_in_a_turn_and_takes_the_answers_from_d() -> None:
    store = MemoryStore()
    pair, decode = pair_over(store, store)
    prompt, known = prompt_of(1, 22), 0
    for turn in range(4):
        assert pair.ask(turn, prompt, max_tokens=13) == known // PAGE_SIZE * PAGE_SIZE
        known = len(prompt) + 12  # the newest token has no K and V yet
        prompt = [*prompt, *decode.tokens[room_of(turn)], *range(5)]
    assert sorted(store.records) == sorted(names_of(decode, prompt[:known]))
    assert decode.copies.extracted and not decode.copies.restored
    pair.prefill.check_empty()
    decode.check_empty()


def test_d_hands_on_what_p_lacks_and_nothing_else() -> None:
    """The page in which the prompt ends is the first one handed on. A request that keeps out of the cache leaves none,
    and pages of a salt serve that salt only."""
    theirs, ours = MemoryStore(), MemoryStore()
    pair, decode = pair_over(theirs, ours)
    prompt = prompt_of(1, 22)
    pair.ask(0, prompt, max_tokens=13, salt=None)
    assert not theirs.records and not ours.records
    pair.ask(1, prompt, max_tokens=13, salt="mine")
    tokens = prompt + decode.tokens[room_of(1)][:12]
    names = names_of(decode, tokens, "mine")
    assert sorted(theirs.records) == sorted(names[:5]) and sorted(ours.records) == sorted(names[5:8])
    pair.ask(2, tokens[:25], max_tokens=1, salt="mine")
    assert len(ours.records) == 3


def test_d_leaves_nothing_of_a_request_that_is_cancelled() -> None:
    store = MemoryStore()
    pair, decode = pair_over(MemoryStore(), store)
    room, tokens = room_of(0), prompt_bytes(prompt_of(1, 22))
    sampling = SamplingParams(60, temperature=0.0)
    decode.scheduler.submit(decode_request(room, "r", tokens, sampling, 0, 1, cache_salt=""))
    pair.prefill.scheduler.submit(prefill_request(room, "r", tokens, 0, 1, cache_salt=""))
    while len(decode.tokens.get(room, [])) < 20:
        pair.turn()
    decode.scheduler.submit(CancelRequest(room))
    decode.run()
    assert not decode.copies.extracted and not store.records


def test_d_takes_a_bounded_part_of_host_memory_and_gives_the_store_none() -> None:
    for host_bytes in (1000, DECODE_HOST_BYTES, DECODE_HOST_BYTES + 1):
        config = decode_cache(CacheConfig(host_bytes=host_bytes, store=StoreConfig(master="m:1", segment_bytes=7)))
        assert config.host_bytes == min(host_bytes, DECODE_HOST_BYTES)
        assert config.store == StoreConfig(master="m:1")


def test_a_store_that_fails_costs_d_no_token_and_p_a_prefill() -> None:
    ours = MemoryStore()
    pair, decode = pair_over(MemoryStore(), ours)
    ours.error = StoreError("away")
    prompt = prompt_of(1, 22)
    pair.ask(0, prompt, max_tokens=13)
    longer = [*prompt, *decode.tokens[room_of(0)], 9]
    assert pair.ask(1, longer, max_tokens=13) == 20  # of the prompt
    decode.check_empty()
