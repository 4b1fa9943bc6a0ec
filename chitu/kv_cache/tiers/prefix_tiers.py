"""`PrefixTiers`: the prefix cache behind the pool. Pages evicted from the pool are still in host memory, or in a slower
store behind it, and can be loaded again.

The step thread calls `write_back`, `load`, `note_prefill` and `flush`, which return at once; `load` returns a
`PageLoad`. The thread `tiers` makes all copies to and from the pool, loads before write-backs.

* **Write-back holds no page.** A page is copied once it has entered the index; cached pages are never written to. If it
  is evicted during the copy, the copy is dropped: the index counts how often it has released each page
  (`PrefixIndex.generation`), before the page can be overwritten.
* **Loading must pay.** A page is loaded if its bytes, at the measured speed of loads, take less time than its tokens at
  the measured speed of prefills. A speed that was not measured lately counts as fast.
* **A loss is a miss**: what cannot be copied in time, or finds no room, is computed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from chitu.clock import Clock
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import PageCopies
from chitu.kv_cache.tiers.page_load import PageLoad
from chitu.kv_cache.tiers.record import HEADER_BYTES, seal
from chitu.kv_cache.tiers.slow_tier import SlowTier
from chitu.kv_cache.tiers.speed import MeasuredSpeed
from chitu.net.job_thread import JobThread

MAX_WRITE_BACKS = 1024
"""Most batches of pages (of one request and step) that wait to be copied; beyond it the oldest are dropped."""
PIECE_PAGES = 8
"""Pages copied to host memory before a waiting load gets its turn."""


class _WriteBack(NamedTuple):
    chain: Sequence[bytes]
    """Keys of a sequence's pages, from its first page on."""
    first: int
    """Position in `chain` of the first new page; the pages from there on are new."""
    pages: Sequence[int]
    generations: Sequence[int]


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
        load = PageLoad(keys, pages, self._clock.monotonic() + self._load_timeout_s)
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
