"""Behind host memory: pages on disk outlive an instance; a store that is slow, broken, lost or wrong is a miss."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scheduler_world import PAGE_SIZE, prompt_of, room_of
from tiered_instances import TIMEOUT_S, MemoryStore, Stored, prompt_bytes

from chitu.kv_cache.tiers.disk_pages import DiskPages
from chitu.kv_cache.tiers.page_store import StoreError
from chitu.kv_cache.tiers.record import HEADER_BYTES
from chitu.kv_cache.tiers.slow_tier import OFF_S

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
    assert "goes without store" in caplog.text
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
    for seed in range(5):
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
