"""`PrefixTiers`: the prefix cache behind the pool. Pages evicted from the pool are still in host memory, or in a slower
store behind it (`SlowTier`), and can be loaded again. Built once, by the main thread, after the pool.

The step thread calls `write_back`, `load`, `note_prefill` and `flush`, which return at once; `load` returns a
`PageLoad`. The thread `tiers` makes all copies to and from the pool, loads before write-backs.

* **Write-back holds no page.** A page is copied once it has entered the index; cached pages are never written to. If it
  is evicted during the copy, the copy is dropped: the index counts how often it has released each page
  (`PrefixIndex.generation`), before the page can be overwritten.
* **Loading must pay.** A page is loaded if its bytes, at the measured speed of loads, take less time than its tokens at
  the measured speed of prefills. A speed that was not measured lately counts as fast.
* **A loss is a miss**: what cannot be copied in time, or finds no room, is computed.
* **Only a slow tier's own thread waits for its store.** Pages go through host memory: puts read from there, fetched
  pages are verified and stored there. If a call fails or times out, the store is off for `OFF_S`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from chitu.clock import Clock
from chitu.config.schema import CacheConfig
from chitu.errors import ConfigError
from chitu.kv_cache.tiers.disk_pages import DiskPages
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.mooncake_pages import MooncakePages
from chitu.kv_cache.tiers.page_copies import PageCopies, PagedRegions, host_memory, page_content_bytes, page_copies_of
from chitu.kv_cache.tiers.pages import HEADER_BYTES, MeasuredSpeed, PageLoad, PageStore, StoreError, is_whole, seal
from chitu.kv_cache.tiers.user_pages import load_store
from chitu.net.threads import JobThread

logger = logging.getLogger(__name__)

OFF_S = 10.0
PUT_PAGES = 8
"""Most pages put in one call; a load waits for its end."""
FETCH_PAGES = 32
"""Most pages fetched in one call; the next call is made when these are in the pool."""
MAX_WAITING_PUTS = 1 << 16
"""Most pages that wait to be put; beyond it the oldest are not put here."""
MAX_WRITE_BACKS = 1024
"""Most batches of pages (of one request and step) that wait to be copied; beyond it the oldest are dropped."""
PIECE_PAGES = 8
"""Pages copied to host memory before a waiting load gets its turn."""
DECODE_HOST_BYTES = 1 << 30
"""Most host memory that D uses: pages wait there for disk and store, and none is read from there."""


class SlowTier:
    """A store behind host memory. A call that takes longer than `call_timeout_s` has failed, whatever its outcome."""

    def __init__(self, name: str, store: PageStore, host: HostPages, call_timeout_s: float, clock: Clock) -> None:
        self.name = name
        self._store = store
        self._host = host
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self.speed = MeasuredSpeed(clock)
        """Speed of fetches, in bytes per second."""
        self._thread: JobThread[Callable[[], None]] = JobThread(f"tier-{name}", lambda job: job())
        self._lock = threading.Lock()
        self._puts: deque[bytes] = deque(maxlen=MAX_WAITING_PUTS)
        self._is_putting = False
        """Whether a job for the next puts is queued."""
        self._off_until_s = 0.0
        self._busy_since_s: float | None = None
        self.hit_pages = 0
        """Prompt pages that came from here since the start. Counted by the thread `tiers`."""
        self.bad_pages = 0
        """Fetched pages that failed verification since the start."""

    # ------------------------------------------------------------------------------------------------------- any thread

    def may_have(self, key: bytes) -> bool:
        return self._is_on() and self._store.may_have(key)

    def put_later(self, keys: Sequence[bytes]) -> None:
        """Queue pages to be put, as far as they are still in host memory by then."""
        with self._lock:
            self._puts.extend(keys)
            is_queued, self._is_putting = self._is_putting, True
        if not is_queued:
            self._thread.put(self._put_next)

    def fetch_later(self, load: PageLoad, then: Callable[[], None]) -> None:
        """Queue a fetch of the next pages of `load` to host memory, as far as they are here. `then` always follows."""
        self._thread.put(partial(self._fetch, load, then))

    def clear_later(self) -> None:
        with self._lock:
            self._puts.clear()
        self._thread.put(partial(self._call, self._store.clear))

    def _is_on(self) -> bool:
        now_s, busy_since_s = self._clock.monotonic(), self._busy_since_s
        is_stuck = busy_since_s is not None and now_s - busy_since_s > self._call_timeout_s
        return not is_stuck and now_s >= self._off_until_s

    # ------------------------------------------------------------------------------------------------------ main thread

    def start(self, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        self._thread.start(spawn)

    def run_one(self) -> bool:
        """Run one job in this thread, without `start`. Return False if none waits."""
        return self._thread.run_one()

    def close(self, timeout_s: float = 2.0) -> None:
        """Drop the waiting puts and stop the thread. Wait at most `timeout_s` for a store that does not answer."""
        with self._lock:
            self._puts.clear()
        self._thread.put(partial(self._call, self._store.close))
        self._thread.close(timeout_s)

    # ------------------------------------------------------------------------------------------------ the tier's thread

    def _put_next(self) -> None:
        with self._lock:
            if not self._is_on():
                self._puts.clear()
            batch = [self._puts.popleft() for _ in range(min(len(self._puts), self._at_once(PUT_PAGES)))]
            self._is_putting = bool(batch)
        if not batch:
            return
        pinned = [(key, slot) for key in batch if (slot := self._host.pin(key)) is not None]
        if pinned:
            keys, records = [key for key, _ in pinned], [self._host.record(slot) for _, slot in pinned]
            self._call(lambda: self._store.store_put(keys, records))
        for _, slot in pinned:
            self._host.unpin(slot)
        self._thread.put(self._put_next)

    def _fetch(self, load: PageLoad, then: Callable[[], None]) -> None:
        begin, keys = load.position, []
        for key in load.keys[begin : begin + self._at_once(FETCH_PAGES)]:
            if key in self._host or load.is_stopped or not self.may_have(key):
                break
            keys.append(key)
        count = self._get(keys, load.host_epoch) if keys else 0
        if count:
            self._call(lambda: self._store.touch(load.keys[: begin + count]))
            load.note_source(self.name, begin, begin + count)
        then()

    def _get(self, keys: list[bytes], epoch: int) -> int:
        """Fetch pages to host memory, unless it was cleared since `epoch`. Return how many of the first were found."""
        taken = [slot for _ in keys if (slot := self._host.take()) is not None]
        records = [self._host.record(slot) for slot, _ in taken]
        keys = keys[: len(taken)]
        begin_s, got = self._clock.monotonic(), [0]

        def get() -> None:
            got[0] = self._store.store_get(keys, records)

        self._call(get)
        if got[0]:
            self.speed.note(sum(map(len, records[: got[0]])), self._clock.monotonic() - begin_s)
        count = 0
        for place, (key, slot) in enumerate(zip(keys, taken, strict=True)):
            if place == count < got[0] and self._is_whole(key, records[place]):
                self._host.publish(key, (slot[0], epoch))
                count += 1
            else:
                self._host.give_back(slot[0])
        return count

    def _is_whole(self, key: bytes, record: memoryview) -> bool:
        if is_whole(record, key):
            return True
        self.bad_pages += 1
        logger.warning("a page in %s is damaged; it is computed again", self.name)
        self._call(lambda: self._store.forget(key))
        return False

    def _at_once(self, most: int) -> int:
        """Return the pages for one call: at most `most`, and a quarter of the slots of host memory."""
        return max(1, min(most, self._host.num_slots // 4))

    def _call(self, action: Callable[[], None]) -> None:
        """Call the store. A failure turns it off for `OFF_S` and is logged, not raised."""
        begin_s = self._busy_since_s = self._clock.monotonic()
        problem = ""
        try:
            action()
        except (StoreError, OSError) as error:
            problem = str(error)
        self._busy_since_s = None
        now_s = self._clock.monotonic()
        if now_s - begin_s > self._call_timeout_s:
            problem = problem or f"a call took {now_s - begin_s:.1f} s"
        if problem:
            self._off_until_s = now_s + OFF_S
            logger.warning("the prefix cache does not use %s for %g s: %s", self.name, OFF_S, problem)


class _WriteBack(NamedTuple):
    chain: Sequence[bytes]
    """Keys of a sequence's pages, from its first page on."""
    first: int
    """Position in `chain` of the first new page; the pages from there on are new."""
    pages: Sequence[int]
    generations: Sequence[int]


class NoTiers:
    """In place of `PrefixTiers`: without any tier, nothing is held and nothing loaded."""

    host_evictions = bad_pages = 0

    @property
    def hit_tokens(self) -> dict[str, int]:
        return {}

    def load(self, chain: Sequence[bytes], first: int, pages: Sequence[int]) -> PageLoad | None:
        return None

    def holds(self, key: bytes) -> bool:
        return False

    def note_prefill(self, num_tokens: int, seconds: float) -> None: ...

    def flush(self) -> None: ...

    def start(self, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None: ...

    def close(self) -> None: ...


class PrefixTiers:
    """Host memory and the slow tiers behind it. `generation(page)` is that of the index, see above. `wake` wakes the
    step thread when a load is done. `page_tokens`: tokens per page. `load_timeout_s`: longest wait of a prompt for its
    pages."""

    def __init__(
        self,
        host: HostPages,
        copies: PageCopies,
        generation: Callable[[int], int],
        page_tokens: int,
        load_timeout_s: float,
        clock: Clock,
        wake: Callable[[], None],
        slow: Sequence[SlowTier] = (),
    ) -> None:
        self._host = host
        self._copies = copies
        self._generation = generation
        self._page_tokens = page_tokens
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._wake = wake
        self._slow = {tier.name: tier for tier in slow}
        self._thread: JobThread[Callable[[], None]] = JobThread("tiers", lambda job: job())
        self._lock = threading.Lock()
        self._write_backs: deque[_WriteBack] = deque(maxlen=MAX_WRITE_BACKS)
        self._is_writing_back = False
        """Whether a job for the next write-back is queued. It runs after all loads that were queued before it."""
        self._restore_speed = MeasuredSpeed(clock)
        self._prefill_speed = MeasuredSpeed(clock)
        self.hit_pages = 0
        """Prompt pages that came from host memory since the start."""

    # ------------------------------------------------------------------------------------------------------ any thread

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Prompt tokens that came from `host`, and from each slow tier by its name, since the start."""
        pages = {"host": self.hit_pages} | {name: tier.hit_pages for name, tier in self._slow.items()}
        return {name: count * self._page_tokens for name, count in pages.items()}

    @property
    def host_evictions(self) -> int:
        return self._host.evictions

    @property
    def bad_pages(self) -> int:
        return sum(tier.bad_pages for tier in self._slow.values())

    # ----------------------------------------------------------------------------------------------------- step thread

    def write_back(self, chain: Sequence[bytes], first: int, pages: Sequence[int]) -> None:
        """Queue the pages of `chain[first:]`, which have just entered the index, to be copied to host memory."""
        work = _WriteBack(chain, first, pages, [self._generation(page) for page in pages])
        with self._lock:
            self._write_backs.append(work)
            is_queued, self._is_writing_back = self._is_writing_back, True
        if not is_queued:
            self._thread.put(self._write_back_next)

    def load(self, chain: Sequence[bytes], first: int, pages: Sequence[int]) -> PageLoad | None:
        """Load the pages of `chain[first:]` into `pages`, in order, up to the first that no tier has. Return None if
        nothing would be loaded. The pages before `first` are in the pool, and are marked as used here, too."""
        if first:
            self._thread.put(partial(self._host.touch, chain[first - 1 :: -1]))
        keys = chain[first:]
        if not keys or not (keys[0] in self._host or any(tier.may_have(keys[0]) for tier in self._slow.values())):
            return None
        if not self._pays(self._restore_speed):
            return None
        load = PageLoad(keys, pages, self._clock.monotonic() + self._load_timeout_s, self._host.epoch)
        self._thread.put(partial(self._restore, load))
        return load

    def holds(self, key: bytes) -> bool:
        """Return whether a load would find this page in host memory. What disk and store have is not known at once."""
        return key in self._host and self._pays(self._restore_speed)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note that a step computed this many prompt tokens in this time."""
        self._prefill_speed.note(num_tokens, seconds)

    def flush(self) -> None:
        """Forget all pages. The index has done so already."""
        self._host.clear()
        for tier in self._slow.values():
            tier.clear_later()

    def _pays(self, speed: MeasuredSpeed) -> bool:
        bytes_per_s, tokens_per_s = speed.per_s(), self._prefill_speed.per_s()
        if bytes_per_s is None or tokens_per_s is None:
            return True
        return self._host.record_bytes / bytes_per_s < self._page_tokens / tokens_per_s

    # ------------------------------------------------------------------------------------------------------ main thread

    def start(self, spawn: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        """Start the threads. `spawn(name, target)` makes a thread whose death must end the process."""
        self._thread.start(spawn)
        for tier in self._slow.values():
            tier.start(spawn)

    def run_one(self) -> bool:
        """Run one job in this thread, without `start`. Return False if none waits."""
        return any([self._thread.run_one(), *[tier.run_one() for tier in self._slow.values()]])

    def close(self) -> None:
        """Stop the threads. No step runs any longer; the pool may be freed once this returns."""
        with self._lock:
            self._write_backs.clear()
        self._thread.close()
        for tier in self._slow.values():
            tier.close()

    # --------------------------------------------------------------------------------------------------- thread `tiers`

    def _write_back_next(self) -> None:
        with self._lock:
            if not self._write_backs:
                self._is_writing_back = False
                return
            work = self._write_backs.popleft()
        if self._write_back_piece(work) and len(work.pages) > PIECE_PAGES:
            chain, first, pages, generations = work
            rest = _WriteBack(chain, first + PIECE_PAGES, pages[PIECE_PAGES:], generations[PIECE_PAGES:])
            with self._lock:
                self._write_backs.appendleft(rest)
        else:
            self._host.touch(work.chain[::-1])
        self._thread.put(self._write_back_next)

    def _write_back_piece(self, work: _WriteBack) -> bool:
        """Copy the next pages. Return False if one could not be copied: pages after it would never be found."""
        keys = work.chain[work.first : work.first + PIECE_PAGES]
        pieces = zip(keys, work.pages, work.generations, strict=False)
        return all(key in self._host or self._extract(key, page, generation) for key, page, generation in pieces)

    def _extract(self, key: bytes, page: int, generation: int) -> bool:
        """Copy a page to host memory. Return whether it is there now."""
        if self._generation(page) != generation:
            return False  # it was evicted before its turn came
        taken = self._host.take()
        if taken is None:
            return False
        record = self._host.record(taken[0])
        self._copies.extract_from_kvpool(page, record[HEADER_BYTES:])
        seal(record, key)
        if not self._host.publish(key, taken, lambda: self._generation(page) == generation):
            return False
        for tier in self._slow.values():
            tier.put_later([key])
        return True

    def _restore(self, load: PageLoad) -> None:
        begin_s, begin = self._clock.monotonic(), load.position
        for key in load.keys[begin:]:
            slot = self._host.pin(key)
            if slot is None:
                break
            content = self._host.record(slot)[HEADER_BYTES:]
            is_wanted = load.restore(partial(self._copies.restore_to_kvpool, content=content))
            self._host.unpin(slot)
            if not is_wanted:
                break
        restored = load.position - begin
        if restored:
            self._restore_speed.note(restored * self._host.record_bytes, self._clock.monotonic() - begin_s)
        source, from_source = load.num_from_source(begin, load.position)
        self.hit_pages += restored - from_source
        if from_source:
            self._slow[source].hit_pages += from_source
        self._host.touch(load.keys[: load.position][::-1])
        if not load.is_stopped and load.position < len(load.keys):
            key = load.keys[load.position]
            for tier in self._slow.values():
                if tier.may_have(key) and self._pays(tier.speed) and load.tries(tier.name):
                    tier.fetch_later(load, partial(self._thread.put, partial(self._restore, load)))
                    return
        load.is_done = True
        self._wake()


class Index(Protocol):
    """The part of `PagedKVCacheManager` that tiers need."""

    page_size: int
    on_cached: Callable[..., None] | None

    def generation(self, page: int) -> int: ...


def build_tiers(
    config: CacheConfig,
    name: str,
    address: str,
    pool: PagedRegions,
    device: str,
    cache: Index,
    free_bytes: int,
    clock: Clock,
    wake: Callable[[], None],
    file: int = -1,
    on_all_ranks: Callable[[PageCopies, memoryview], PageCopies] = lambda own, memory: own,
) -> PrefixTiers:
    """Build the tiers of an instance with `cache.host_bytes`; from now on `cache` passes them its pages. `name` and
    `address` are the instance's, `device` is the pool's. `free_bytes` are those of host memory.
    `file` is the descriptor of the tiers' memory if other ranks map it. `on_all_ranks` extends this rank's copies
    between pool and that memory to all ranks. Raise ConfigError if host memory or a store cannot be used."""
    page_bytes = page_content_bytes(pool.layout)
    if config.host_bytes < HEADER_BYTES + page_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, less than one page of {HEADER_BYTES + page_bytes}")
    if config.host_bytes > free_bytes:
        raise ConfigError(f"cache.host_bytes is {config.host_bytes}, but {free_bytes} bytes of host memory are free")
    memory = host_memory(config.host_bytes, file)
    host = HostPages(memory, page_bytes)
    copies = on_all_ranks(page_copies_of(pool, device, memory), memory)
    timeout_s, slow = config.load_timeout_s, list[SlowTier]()
    if config.disk.path is not None:
        shared = Path(config.disk.path)
        disk = DiskPages(shared / name, config.disk.max_bytes, shared)
        slow.append(SlowTier("disk", disk, host, timeout_s, clock))
    if config.store.master is not None:
        store = MooncakePages(config.store, address, host.record_bytes)
        store.connect()
        slow.append(SlowTier("store", store, host, timeout_s, clock))
    if config.store.plugin is not None:
        own = load_store(config.store.plugin, config.store.options)
        slow.append(SlowTier("store", own, host, timeout_s, clock))
    tiers = PrefixTiers(host, copies, cache.generation, cache.page_size, timeout_s, clock, wake, slow)
    cache.on_cached = tiers.write_back
    return tiers


def decode_cache(config: CacheConfig) -> CacheConfig:
    """Return D's cache configuration: D writes pages to tiers that other instances read, and reads none itself."""
    store = replace(config.store, segment_bytes=0)
    return replace(config, host_bytes=min(config.host_bytes, DECODE_HOST_BYTES), store=store)
