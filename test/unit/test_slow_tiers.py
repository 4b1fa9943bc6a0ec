"""Behind host memory: pages on disk outlive an instance, and a store that is slow, broken, lost or lies is a miss."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_pd_scheduler import PAGE_SIZE, Wire, prompt_of, room_of
from test_prefix_tiers import TIMEOUT_S, Copies, Engine, Tiered, TieredPair

from chitu.config.schema import CacheConfig, StoreConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.build import DECODE_HOST_BYTES, decode_cache
from chitu.kv_cache.tiers.disk_pages import DiskPages
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import page_content_bytes
from chitu.kv_cache.tiers.page_store import PageStore, StoreError
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers
from chitu.kv_cache.tiers.record import HEADER_BYTES
from chitu.kv_cache.tiers.slow_tier import OFF_S, SlowTier
from chitu.protocol import CancelRequest, DecodeRequest, PrefillRequest, SamplingParams

FOREVER = 1 << 40


class Stored(Tiered):
    """A `Tiered` with stores behind its host memory."""

    def __init__(
        self,
        stores: dict[str, PageStore],
        num_pages: int = 16,
        host_pages: int = 256,
        sender: Wire | None = None,
        receiver: Wire | None = None,
    ) -> None:
        self.stores = stores
        super().__init__(num_pages, host_pages, sender, receiver)

    def make_tiers(self) -> PrefixTiers:
        assert isinstance(self.executor, Engine)
        page_bytes = page_content_bytes(self.executor.pool.layout)
        self.host = HostPages(memoryview(bytearray(self.host_pages * (HEADER_BYTES + page_bytes))), page_bytes)
        self.copies = Copies(self.executor.pool)
        self.slow = {
            name: SlowTier(name, store, self.host, TIMEOUT_S, self.clock) for name, store in self.stores.items()
        }
        self.tiers = PrefixTiers(
            self.host,
            self.copies,
            self.cache.generation,
            PAGE_SIZE,
            TIMEOUT_S,
            self.clock,
            self._note_wake,
            list(self.slow.values()),
        )
        self.cache.on_cached = self.tiers.write_back
        return self.tiers

    def evict(self) -> None:
        """All that is in the pool and in host memory."""
        super().evict()
        self.host.clear()


class MemoryStore:
    """A store that can be told to misbehave."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytearray] = {}
        self.error: Exception | None = None
        self.before_get = lambda: None
        self.calls = 0

    def may_have(self, key: bytes) -> bool:
        return True

    def store_put(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> None:
        self._call()
        for key, record in zip(keys, records, strict=True):
            self.records.setdefault(key, bytearray(record))

    def store_get(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        self._call()
        self.before_get()
        for count, (key, record) in enumerate(zip(keys, records, strict=True)):
            if key not in self.records:
                return count
            record[:] = self.records[key]
        return len(keys)

    def forget(self, key: bytes) -> None:
        self._call()
        self.records.pop(key, None)

    def touch(self, chain: Sequence[bytes]) -> None:
        self._call()

    def clear(self) -> None:
        self._call()

    def close(self) -> None: ...

    def _call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def test_what_host_memory_lost_comes_back_from_disk_and_after_a_restart_too(tmp_path: Path) -> None:
    prompt = prompt_of(1, 41)
    instance = Stored({"disk": DiskPages(tmp_path, FOREVER)})
    instance.ask(0, prompt)
    instance.evict()
    assert instance.ask(1, prompt) == 40
    assert instance.slow["disk"].hit_pages == 10 and instance.tiers.hit_pages == 0
    instance.check_empty()
    again = Stored({"disk": DiskPages(tmp_path, FOREVER)})
    assert again.ask(0, prompt) == 40
    other = Stored({"disk": DiskPages(tmp_path, FOREVER)})
    assert other.ask(0, prompt, "another salt") == 0


def test_a_chain_is_put_together_from_all_tiers(tmp_path: Path) -> None:
    """The first pages are in the pool, others in host memory, on disk and in a store."""
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


def prompt_bytes(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


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
    """The scheduler goes on in the middle of the call, as it does while another thread is in it."""
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
        for index, tokens in ((1, prompt), (2, other)):  # the second does not even ask
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
    assert instance.ask(1, prompt) == 40  # nobody knew
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
    """Tiers that hold a part each, records that change, calls that fail, instances that are replaced."""
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
            for name, tier in instance.slow.items():
                hits[name] += tier.hit_pages
    assert min(hits.values()) > 5, hits


# ---------------------------------------------------------------------------------------------------- the way back to P


def pair_over(prefill: PageStore, decode: PageStore) -> tuple[TieredPair, Stored]:
    pair = TieredPair(
        lambda wire: Stored({"store": prefill}, num_pages=64, sender=wire),
        lambda wire: Stored({"store": decode}, num_pages=64, receiver=wire),
    )
    assert isinstance(pair.decode, Stored)
    return pair, pair.decode


def names_of(instance: Tiered, tokens: list[int], salt: str = "") -> list[bytes]:
    keys = instance.cache.page_keys(salt)
    assert keys is not None
    return keys.upto(len(tokens) // PAGE_SIZE, prompt_bytes(tokens))


def test_p_computes_what_is_new_in_a_turn_and_takes_the_answers_from_d() -> None:
    store = MemoryStore()
    pair, decode = pair_over(store, store)
    prompt, known = prompt_of(1, 22), 0
    for turn in range(4):
        assert pair.ask(turn, prompt, max_tokens=13) == known // PAGE_SIZE * PAGE_SIZE
        known = len(prompt) + 12  # of the newest token K and V do not exist
        prompt = [*prompt, *decode.tokens[room_of(turn)], *range(5)]
    assert sorted(store.records) == sorted(names_of(decode, prompt[:known]))
    assert decode.copies.extracted and not decode.copies.restored
    pair.prefill.check_empty()
    decode.check_empty()


def test_d_hands_on_what_p_lacks_and_nothing_else() -> None:
    """The page in which the prompt ends is the first of them. Nothing of a request that keeps out of the cache, and of
    a salt for the same salt alone."""
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
    decode.scheduler.submit(DecodeRequest(room, "r", tokens, sampling, 0, 1, cache_salt=""))
    pair.prefill.scheduler.submit(PrefillRequest(room, "r", tokens, 0, 1, cache_salt=""))
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


# ------------------------------------------------------------------------------------------------------------- the disk


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record_of(number: int, nbytes: int = 100) -> memoryview:
    return memoryview(bytes([number]) * nbytes)


def put(disk: DiskPages, *numbers: int) -> None:
    disk.store_put([key_of(number) for number in numbers], [record_of(number) for number in numbers])


def got(disk: DiskPages, *numbers: int) -> int:
    records = [memoryview(bytearray(100)) for _ in numbers]
    count = disk.store_get([key_of(number) for number in numbers], records)
    assert [bytes(record) for record in records[:count]] == [bytes(record_of(number)) for number in numbers[:count]]
    return count


def test_files_are_bounded_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 300)
    put(disk, 1, 2, 3)
    disk.touch([key_of(1), key_of(2)])
    put(disk, 4)
    assert [disk.may_have(key_of(number)) for number in (1, 2, 3, 4)] == [True, True, False, True]
    put(disk, 5)
    assert [disk.may_have(key_of(number)) for number in (1, 2, 4, 5)] == [True, False, True, True]
    assert disk.num_bytes == 300 and len(list(tmp_path.iterdir())) == 3
    disk.store_put([key_of(6)], [record_of(6, 301)])
    assert not disk.may_have(key_of(6)) and len(disk) == 3
    smaller = DiskPages(tmp_path, 250)
    assert len(smaller) == 2 and smaller.num_bytes == 200


def test_instances_read_each_others_files_and_write_to_their_own(tmp_path: Path) -> None:
    mine = DiskPages(tmp_path / "P0", 1000, tmp_path)
    other = DiskPages(tmp_path / "D0", 200, tmp_path)  # begins later
    put(other, 1, 2)
    assert mine.may_have(key_of(1)) and got(mine, 1, 2, 3) == 2
    put(mine, 3)
    assert got(mine, 1, 2, 3) == 3 and got(mine, 3, 4) == 1
    assert len(mine) == 1 and mine.num_bytes == 100
    os.truncate(tmp_path / "D0" / f"{key_of(2).hex()}.kv", 99)
    assert got(mine, 1, 2) == 1
    mine.forget(key_of(1))  # it was not the page of this key
    assert got(mine, 1) == 0 and got(other, 1) == 0
    mine.clear()
    assert (tmp_path / "D0" / f"{key_of(2).hex()}.kv").exists()
    (tmp_path / "D0").rename(tmp_path / "D1")
    assert got(mine, 3) == 0
    (tmp_path / "file").write_text("mine")
    put(mine, 5)
    assert got(mine, 5) == 1


def test_torn_lost_and_foreign_files(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 1000)
    put(disk, 1, 2, 3, 4)
    (tmp_path / f"{key_of(2).hex()}.kv").unlink()
    assert got(disk, 1, 2, 3) == 1 and not disk.may_have(key_of(2))
    os.truncate(tmp_path / f"{key_of(3).hex()}.kv", 99)
    assert got(disk, 3) == 0 and got(disk, 4) == 1 and disk.num_bytes == 200
    (tmp_path / f"{key_of(5).hex()}.kv.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "abc.kv").write_text("mine")
    again = DiskPages(tmp_path, 1000)
    assert len(again) == 2 and {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "abc.kv",
        *(f"{key_of(number).hex()}.kv" for number in (1, 4)),
    }


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    disk = DiskPages(tmp_path, 1 << 30)
    put(disk, 1)
    record, limits = memoryview(bytes(1 << 22)), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            disk.store_put([key_of(2)], [record])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not disk.may_have(key_of(2)) and disk.num_bytes == 100 and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache\.disk\.path"):
        DiskPages(tmp_path / "file", 1000)
