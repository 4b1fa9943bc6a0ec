"""The prefix cache goes on in host memory: KV of real bytes, small pools, and every token depends on every byte.

The thread `tiers` is pumped by the test, one job at a time and at moments that a seed picks, between the steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from test_pd_scheduler import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.config.schema import CacheConfig
from chitu.engine.executor import ExecutorInfo
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.build import build_tiers
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import HostPageCopies, PageCopies, page_content_bytes
from chitu.kv_cache.tiers.prefix_tiers import PIECE_PAGES, PrefixTiers
from chitu.kv_cache.tiers.record import HEADER_BYTES, is_whole, seal
from chitu.kv_cache.tiers.speed import MEMORY_S, MeasuredSpeed
from chitu.kv_transfer.events import TransferEvent, TransferEventKind
from chitu.protocol import (
    FP8_E4M3,
    CancelRequest,
    DecodeRequest,
    KVLayout,
    PrefillRequest,
    SamplingParams,
    UnifiedRequest,
    pack_i32,
)
from chitu.testing.checksum_engine import ChecksumExecutor, ChecksumPool, Pace, checksum_layout
from chitu.testing.clock import FakeClock
from chitu.testing.fake_executor import expected_tokens

GREEDY = SamplingParams(3, temperature=0.0)
TIMEOUT_S = 2.0


class Engine(ChecksumExecutor):
    def __init__(self, info: ExecutorInfo, num_pages: int, page_size: int, aux_slots: int) -> None:
        layout = checksum_layout(page_size, INFO.vocab_size)
        self.pool = ChecksumPool(layout, num_pages, aux_slots)
        super().__init__(INFO, self.pool, Pace())


class Copies(HostPageCopies):
    """Notes what is copied."""

    def __init__(self, pool: ChecksumPool) -> None:
        super().__init__(pool)
        self.extracted: list[int] = []
        self.restored: list[int] = []

    def extract_from_kvpool(self, page: int, content: memoryview) -> None:
        self.extracted.append(page)
        super().extract_from_kvpool(page, content)

    def restore_to_kvpool(self, page: int, content: memoryview) -> None:
        self.restored.append(page)
        super().restore_to_kvpool(page, content)


class Tiered(Instance):
    """An instance with `host_pages` pages of host memory behind a pool of `num_pages`."""

    def __init__(
        self,
        num_pages: int,
        host_pages: int = 256,
        sender: Wire | None = None,
        receiver: Wire | None = None,
        overlap: bool = False,
    ) -> None:
        self.host_pages = host_pages
        self.woken = 0
        super().__init__(num_pages, sender=sender, receiver=receiver, overlap=overlap, executor=Engine)

    def make_tiers(self) -> PrefixTiers:
        assert isinstance(self.executor, Engine)
        pool = self.executor.pool
        page_bytes = page_content_bytes(pool.layout)
        self.host = HostPages(memoryview(bytearray(self.host_pages * (HEADER_BYTES + page_bytes))), page_bytes)
        self.copies = Copies(pool)
        self.tiers = PrefixTiers(
            self.host, self.copies, self.cache.generation, PAGE_SIZE, TIMEOUT_S, self.clock, self._note_wake
        )
        self.cache.on_cached = self.tiers.write_back
        return self.tiers

    def _note_wake(self) -> None:
        self.woken += 1

    def pump(self) -> None:
        while self.tiers.run_one():
            pass

    def step(self) -> None:
        self.scheduler.step()

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            self.pump()
            self.step()
            if self.scheduler.is_idle:
                self.pump()
                self.step()
                return
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.load}")

    def submit(self, index: int, prompt: list[int], salt: str | None = "") -> None:
        room = room_of(index)
        self.scheduler.submit(UnifiedRequest(room, f"r{index}", pack_i32(prompt), GREEDY, cache_salt=salt))

    def ask(self, index: int, prompt: list[int], salt: str | None = "") -> int:
        """Tokens of the prompt that were not computed."""
        self.submit(index, prompt, salt)
        self.run()
        self.check(index, prompt)
        return self.cached.get(room_of(index), 0)

    def check(self, index: int, prompt: list[int]) -> None:
        assert self.tokens[room_of(index)] == expected_tokens(prompt, 3, INFO.vocab_size)

    def evict(self) -> None:
        """All that is cached in the pool."""
        other = room_of(1 << 20)
        self.cache.reserve(other, self.cache.num_pages * PAGE_SIZE)
        assert isinstance(self.executor, Engine)
        self.executor.pool.kv[:] = 0xEE
        self.cache.remove_task(other)


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
    assert instance.tiers.hit_pages == 9  # 5 for the first, the 4 behind them for the second


def test_answers_come_back_too() -> None:
    instance = Tiered(16)
    prompt = prompt_of(1, 22)
    instance.ask(0, prompt)
    instance.evict()
    longer = [*prompt, *instance.tokens[room_of(0)], 9]
    assert instance.ask(1, longer) == 24  # K and V of 22 + 2 tokens were computed


def test_random_requests_have_the_tokens_of_a_run_without_any_cache() -> None:
    """Prompts that fork, a pool and host memory that hold a part of them, jobs at random moments, cancels, a flush now
    and then."""
    hits = evictions = 0
    for seed in range(16):
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
    instance.pump()  # the copies were asked for before it
    assert len(instance.host) == 0
    instance.ask(1, prompt)
    instance.evict()
    instance.submit(2, prompt)
    instance.step()
    instance.tiers.run_one()  # touches
    instance.pump()
    assert instance.tiers.hit_pages == 10
    instance.scheduler.flush_cache()  # loaded, but not yet taken
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
    for _ in range(12):  # others are computed meanwhile
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
    instance.clock.advance(MEMORY_S)  # what was slow once is tried again
    assert instance.ask(2, prompt) == 40


def test_a_write_back_lets_loads_go_ahead() -> None:
    """A long prompt's pages are copied piece by piece."""
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


class MovingWire(Wire):
    """Moves KV, too."""

    def deliver(self, rng: random.Random) -> None:
        assert self.prefill is not None and self.decode is not None
        source, target = self.prefill.executor, self.decode.executor
        assert isinstance(source, Engine) and isinstance(target, Engine)
        for room in self.computed:
            if room in self.announced and room not in self.dead:
                tables = self.prefill.cache.get_page_indices(room), self.decode.cache.get_page_indices(room)
                for from_page, to_page in list(zip(*tables, strict=False))[self.prefix_pages[room] :]:
                    target.pool.kv[:, rows_of(to_page)] = source.pool.kv[:, rows_of(from_page)]
        super().deliver(rng)


def rows_of(page: int) -> slice:
    return slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)


class TieredPair:
    """P and D, on a wire that is perfect; what is given makes them, P with tiers and D as it likes."""

    def __init__(self, prefill: Callable[[Wire], Tiered], decode: Callable[[Wire], Instance]) -> None:
        self.wire, self.rng = MovingWire(), random.Random(1)
        self.prefill = self.wire.prefill = prefill(PSide(self.wire))
        self.decode = self.wire.decode = decode(DSide(self.wire))

    def turn(self) -> None:
        for instance in (self.prefill, self.decode):
            if isinstance(instance, Tiered):
                instance.pump()
            instance.scheduler.step()
        self.wire.deliver(self.rng)

    def ask(self, index: int, prompt: list[int], max_tokens: int = 3, salt: str | None = "") -> int:
        """Tokens of the prompt that P did not compute."""
        room, tokens, sampling = room_of(index), pack_i32(prompt), SamplingParams(max_tokens, temperature=0.0)
        before = self.prefill.scheduler._load.prompt_tokens
        self.decode.scheduler.submit(DecodeRequest(room, f"r{index}", tokens, sampling, 0, 1, cache_salt=salt))
        self.prefill.scheduler.submit(PrefillRequest(room, f"r{index}", tokens, 0, 1, cache_salt=salt))
        while room not in self.decode.finishes or not (
            self.decode.scheduler.is_idle and self.prefill.scheduler.is_idle
        ):
            self.turn()
        self.turn()  # the last pages go to the tiers
        assert self.decode.tokens[room] == expected_tokens(prompt, max_tokens, INFO.vocab_size)
        return len(prompt) - (self.prefill.scheduler._load.prompt_tokens - before)


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


def test_speculation_that_gives_way_while_it_loads_starts_anew() -> None:
    """Its pages go to an announced request, and are loaded again when it has some."""
    wire = Wire()
    side = PSide(wire)
    instance = wire.prefill = Tiered(16, sender=side)
    prompt, urgent = prompt_of(1, 41), prompt_of(2, 50)

    def ask(index: int, tokens: list[int]) -> None:
        room = room_of(index)
        instance.scheduler.submit(PrefillRequest(room, f"r{index}", pack_i32(tokens), 0, 1, cache_salt=""))
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
    speculating = instance.scheduler._prefill.computing[room_of(1)]
    load = speculating.load
    assert load is not None
    wire.announced[room_of(2)] = 0
    instance.scheduler.submit(PrefillRequest(room_of(2), "r2", pack_i32(urgent), 0, 1, cache_salt=""))
    wire.requested.add(room_of(2))
    instance.step()
    wire.events_p.append(TransferEvent(TransferEventKind.ANNOUNCED, room_of(2)))
    instance.step()
    assert room_of(2) in instance.scheduler._prefill.computing and load.is_stopped
    while room_of(2) not in wire.computed:
        instance.pump()
        instance.step()
    finish(2)
    while room_of(1) not in wire.computed:
        instance.pump()
        instance.step()
    assert speculating.cached_tokens == 40
    finish(1)
    instance.run()
    instance.check_empty()


# ------------------------------------------------------------------------------------------------------ the parts alone


def host_of(num_slots: int) -> HostPages:
    return HostPages(memoryview(bytearray(num_slots * (HEADER_BYTES + 16) + 7)), 16)


def put(host: HostPages, *keys: bytes) -> None:
    for key in keys:
        taken = host.take()
        assert taken is not None and host.publish(key, taken)


def test_host_pages_give_up_the_least_recently_used_that_nobody_reads() -> None:
    host = host_of(3)
    put(host, b"a", b"b", b"c")
    pinned = host.pin(b"a")
    assert pinned is not None
    host.touch([b"b"])
    put(host, b"d")
    assert [key in host for key in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    assert (len(host), host.evictions, host.num_slots) == (3, 1, 3)
    others = [host.pin(key) for key in (b"b", b"d")]
    assert host.take() is None
    for slot in (pinned, *others):
        assert slot is not None
        host.unpin(slot)
    assert host.take() is not None


def test_host_pages_forget_all_and_what_is_filling_too() -> None:
    host = host_of(3)
    put(host, b"a", b"b")
    pinned, taken = host.pin(b"a"), host.take()
    assert pinned is not None and taken is not None
    host.clear()
    assert len(host) == 0 and host.pin(b"a") is None
    assert not host.publish(b"c", taken)
    free = [host.take() for _ in range(2)]
    assert None not in free and host.take() is None, "a slot that is read went to others"
    host.unpin(pinned)
    assert host.take() is not None


def test_a_key_is_kept_once() -> None:
    host = host_of(2)
    put(host, b"a")
    taken = host.take()
    assert taken is not None and not host.publish(b"a", taken)
    assert len(host) == 1 and host.take() is not None


@pytest.mark.parametrize("position", range(0, HEADER_BYTES + 16))
def test_a_changed_record_is_told_apart(position: int) -> None:
    key, record = bytes(range(16)), bytearray(HEADER_BYTES + 16)
    record[HEADER_BYTES:] = b"k and v of a pag"
    seal(memoryview(record), key)
    assert is_whole(memoryview(record), key) and not is_whole(memoryview(record), bytes(16))
    record[position] ^= 1
    is_padding = 36 <= position < HEADER_BYTES
    assert is_whole(memoryview(record), key) == is_padding


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + 15])
def test_a_record_that_was_cut_off_is_told_apart(length: int) -> None:
    record = bytearray(HEADER_BYTES + 16)
    seal(memoryview(record), bytes(16))
    assert not is_whole(memoryview(record)[:length], bytes(16))


LAYOUTS = {
    "keys and values": KVLayout("m", 2, 2, 8, 4, "float16", 100),
    "one rank's share, scales in the page": KVLayout("m", 3, 4, 16, 4, FP8_E4M3, 100, tp_size=2),
    "a head that two ranks hold": KVLayout("m", 3, 2, 16, 4, "float32", 100, tp_size=4),
    "latent, one region a layer": KVLayout("m", 3, 1, 24, 4, "bfloat16", 100, tp_size=2, regions_per_layer=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_tensors_are_copied_as_host_memory_is(layout: KVLayout) -> None:
    """Of the first rank, and of another one, which leaves to its neighbour what that holds too."""
    first = layout.num_kv_heads >= layout.tp_size
    for tp_rank in range(layout.tp_size):
        check_copies(layout, tp_rank, is_copied=first or tp_rank % (layout.tp_size // layout.num_kv_heads) == 0)


def check_copies(layout: KVLayout, tp_rank: int, is_copied: bool) -> None:
    from chitu.kv_cache.pool import KVPool
    from chitu.kv_cache.tiers.device_page_copies import DevicePageCopies

    pool = KVPool(layout, 5, 0, has_scratch=True)
    for number, region in enumerate(pool.regions):
        region.view(-1).view(torch.uint8).copy_(torch.arange(region.nbytes) * 7 + number)
    nbytes = page_content_bytes(pool.layout)
    holders = max(1, layout.tp_size // layout.num_kv_heads)
    assert nbytes * holders == layout.bytes_per_page * layout.tp_size
    contents = [bytearray(nbytes) for _ in range(2)]
    both: list[PageCopies] = [HostPageCopies(pool, tp_rank), DevicePageCopies(pool, tp_rank)]
    for copies, content in zip(both, contents, strict=True):
        copies.extract_from_kvpool(3, memoryview(content))
    assert contents[0] == contents[1] and (len(set(contents[0])) > 9) == is_copied
    if not is_copied:
        HostPageCopies(pool, tp_rank - 1).extract_from_kvpool(3, memoryview(contents[0]))
    for target, copies in enumerate(both):
        before = [region.clone() for region in pool.regions]
        copies.restore_to_kvpool(target, memoryview(contents[0]))
        for region, old in zip(pool.regions, before, strict=True):
            assert torch.equal(region[target].view(torch.uint8), old[3].view(torch.uint8))
            assert torch.equal(region[target + 1 :].view(torch.uint8), old[target + 1 :].view(torch.uint8))
    pool.close()


def test_a_speed_is_that_of_the_last_measurements() -> None:
    clock = FakeClock()
    speed = MeasuredSpeed(clock)
    assert speed.per_s() is None
    for _ in range(20):
        speed.note(100, 1.0)
    for _ in range(20):
        speed.note(100, 10.0)
    measured = speed.per_s()
    assert measured is not None and measured == pytest.approx(10.0, rel=0.01)
    clock.advance(MEMORY_S)
    assert speed.per_s() is None


def test_memory_for_less_than_a_page_and_for_more_than_there_is_are_refused() -> None:
    instance = Tiered(16)
    assert isinstance(instance.executor, Engine)
    pool = instance.executor.pool
    page = HEADER_BYTES + page_content_bytes(pool.layout)

    def build(host_bytes: int, free_bytes: int) -> Sequence[object]:
        config = CacheConfig(host_bytes=host_bytes)
        return [
            build_tiers(
                config, "P0", "127.0.0.1", pool, "cpu", instance.cache, free_bytes, instance.clock, lambda: None
            )
        ]

    build(page, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page - 1}, less than one page of {page}"):
        build(page - 1, page)
    with pytest.raises(ConfigError, match=f"cache.host_bytes is {page + 1}, but {page} bytes"):
        build(page + 1, page)
