"""`SlowTier`: a store behind host memory, on a thread of its own that may block.

Pages go through host memory: puts read from there, fetched pages are verified and stored there. If a call fails or
times out, the store is off for `OFF_S`: no request waits for it meanwhile, and every lookup is a miss. Invariant: only
the tier's own thread waits for the store.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from chitu.clock import Clock
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_load import PageLoad
from chitu.kv_cache.tiers.page_store import PageStore, StoreError
from chitu.kv_cache.tiers.record import is_whole
from chitu.kv_cache.tiers.speed import MeasuredSpeed
from chitu.net.job_thread import JobThread

logger = logging.getLogger(__name__)

OFF_S = 10.0
PUT_PAGES = 8
"""Most pages put in one call; a load waits for its end."""
FETCH_PAGES = 32
"""Most pages fetched in one call; the next call is made when these are in the pool."""
MAX_WAITING_PUTS = 1 << 16
"""Most pages that wait to be put; beyond it the oldest are not put here."""


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
        count = self._get(keys) if keys else 0
        if count:
            self._call(lambda: self._store.touch(load.keys[: begin + count]))
            load.note_source(self.name, begin, begin + count)
        then()

    def _get(self, keys: list[bytes]) -> int:
        """Fetch pages to host memory. Return how many of the first are there now."""
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
                self._host.publish(key, slot)
                count += 1
            else:
                self._host.give_back(slot[0])
        return count

    def _is_whole(self, key: bytes, record: memoryview) -> bool:
        if is_whole(record, key):
            return True
        self.bad_pages += 1
        logger.warning("a page in %s is not what was put there; it is computed again", self.name)
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
            logger.warning("the prefix cache goes without %s for %g s: %s", self.name, OFF_S, problem)
