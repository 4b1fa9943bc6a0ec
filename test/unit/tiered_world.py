"""Schedulers without processes, with tiers behind their pool and a store that misbehaves.

KV is real bytes, pools are small, and every token depends on every byte. The test runs the jobs of the thread `tiers`
one at a time, between the steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.engine.executor import ExecutorInfo
from chitu.fake.checksum import ChecksumExecutor, ChecksumPool, Pace, checksum_layout
from chitu.fake.executor import expected_tokens
from chitu.kv_cache.tiers.host_pages import HostPages
from chitu.kv_cache.tiers.page_copies import PoolPageCopies, page_content_bytes
from chitu.kv_cache.tiers.pages import HEADER_BYTES, PageStore
from chitu.kv_cache.tiers.prefix_tiers import PrefixTiers, SlowTier
from chitu.protocol import (
    SamplingParams,
    pack_i32,
)

GREEDY = SamplingParams(3, temperature=0.0)
TIMEOUT_S = 2.0


class Engine(ChecksumExecutor):
    def __init__(self, info: ExecutorInfo, num_pages: int, page_size: int, aux_rows: NDArray[np.uint8]) -> None:
        layout = checksum_layout(page_size, INFO.vocab_size)
        self.pool = ChecksumPool(layout, num_pages, len(aux_rows))
        super().__init__(INFO, self.pool, Pace())


class Copies(PoolPageCopies):
    """Page copies that note what is copied."""

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
    """An instance with `host_pages` pages of host memory behind a pool of `num_pages`, and `stores` behind that."""

    def __init__(
        self,
        num_pages: int,
        host_pages: int = 256,
        sender: Wire | None = None,
        receiver: Wire | None = None,
        overlap: bool = False,
        stores: Mapping[str, PageStore] = MappingProxyType({}),
    ) -> None:
        self.host_pages = host_pages
        self.stores = stores
        self.woken = 0
        super().__init__(num_pages, sender=sender, receiver=receiver, overlap=overlap, executor=Engine)

    def make_tiers(self) -> PrefixTiers:
        assert isinstance(self.executor, Engine)
        pool = self.executor.pool
        page_bytes = page_content_bytes(pool.layout)
        self.host = HostPages(memoryview(bytearray(self.host_pages * (HEADER_BYTES + page_bytes))), page_bytes)
        self.copies = Copies(pool)
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
        self.scheduler.submit(unified_request(room, f"r{index}", pack_i32(prompt), GREEDY, cache_salt=salt))

    def ask(self, index: int, prompt: list[int], salt: str | None = "") -> int:
        """Serve a request and return how many tokens of its prompt were not computed."""
        self.submit(index, prompt, salt)
        self.run()
        self.check(index, prompt)
        return self.cached.get(room_of(index), 0)

    def check(self, index: int, prompt: list[int]) -> None:
        assert self.tokens[room_of(index)] == expected_tokens(prompt, 3, INFO.vocab_size)

    def evict(self) -> None:
        """Evict everything that is cached in the pool."""
        other = room_of(1 << 20)
        self.cache.reserve(other, self.cache.num_pages * PAGE_SIZE)
        assert isinstance(self.executor, Engine)
        self.executor.pool.kv[:] = 0xEE
        self.cache.remove_task(other)


class Stored(Tiered):
    """A `Tiered` whose `evict` leaves pages only in its stores."""

    def __init__(
        self,
        stores: Mapping[str, PageStore],
        num_pages: int = 16,
        host_pages: int = 256,
        sender: Wire | None = None,
        receiver: Wire | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(num_pages, host_pages, sender, receiver, overlap, stores=stores)

    def evict(self) -> None:
        """Evict everything that is in the pool and in host memory."""
        super().evict()
        self.host.clear()


class MemoryStore:
    """A store that a test can make misbehave."""

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


class MovingWire(Wire):
    """A wire that moves KV too."""

    def deliver(self, rng: random.Random) -> None:
        assert self.prefill is not None and self.decode is not None
        source, target = self.prefill.executor, self.decode.executor
        assert isinstance(source, ChecksumExecutor) and isinstance(target, ChecksumExecutor)
        for room in self.computed:
            if room in self.announced and room not in self.dead:
                tables = self.prefill.cache.get_page_indices(room), self.decode.cache.get_page_indices(room)
                for from_page, to_page in list(zip(*tables, strict=False))[self.prefix_pages[room] :]:
                    target._pool.kv[:, rows_of(to_page)] = source._pool.kv[:, rows_of(from_page)]
        super().deliver(rng)


def rows_of(page: int) -> slice:
    return slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)


class TieredPair:
    """P and D on a wire that never fails. The callables make them: P has tiers, D may have some."""

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
        """Serve a request and return how many tokens of its prompt P did not compute."""
        room, tokens, sampling = room_of(index), pack_i32(prompt), SamplingParams(max_tokens, temperature=0.0)
        before = self.prefill.scheduler._load.prompt_tokens
        self.decode.scheduler.submit(decode_request(room, f"r{index}", tokens, sampling, 0, 1, cache_salt=salt))
        self.prefill.scheduler.submit(prefill_request(room, f"r{index}", tokens, 0, 1, cache_salt=salt))
        while room not in self.decode.finishes or not (
            self.decode.scheduler.is_idle and self.prefill.scheduler.is_idle
        ):
            self.turn()
        self.turn()  # the last pages go to the tiers
        assert self.decode.tokens[room] == expected_tokens(prompt, max_tokens, INFO.vocab_size)
        return len(prompt) - (self.prefill.scheduler._load.prompt_tokens - before)


def prompt_bytes(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


def names_of(instance: Tiered, tokens: list[int], salt: str = "") -> list[bytes]:
    keys = instance.cache.page_keys(salt)
    assert keys is not None
    return keys.upto(len(tokens) // PAGE_SIZE, prompt_bytes(tokens))
