"""Requests that run through a flush of the prefix cache, or through a change of weights without a drain, leave nothing
in any cache, whatever they were doing. KV is real bytes and depends on the weights, so wrong pages show in the tokens
of prompts that go on behind all that is cached: on the same instances, and on new ones over the same store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import pytest
from scheduler_world import INFO, PAGE_SIZE, Instance, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request
from tiered_world import Engine, MemoryStore, Stored, TieredPair, names_of, rows_of

from chitu.fake.executor import expected_tokens
from chitu.instance.prefill import ESTIMATE_S
from chitu.instance.sequences import SequenceState
from chitu.protocol import Fork, SamplingParams, pack_i32

SHORT, LONG, WITH_CHOICES, PATIENT = (prompt_of(index, length) for index, length in enumerate((3, 25, 9, 30)))
"""Prompts of less than a page, of several chunks, of two choices, and one that waits."""
CHOICES = (Fork(room_of(31), "r", 7), Fork(room_of(32), "r", 8))
OTHERS = 40
"""Number of the first request that comes afterwards."""
S = SequenceState


@dataclass
class World:
    """One unified instance, or P and D, over a store that nothing clears. `turn` runs all of them once."""

    store: MemoryStore
    kind: str
    pages: int = 20
    number: int = 0
    """Number of the weights that serve."""
    prompts: dict[bytes, list[int]] = field(default_factory=dict)
    seen: set[SequenceState] = field(default_factory=set)
    """States of requests when something happened to their instance."""

    def __post_init__(self) -> None:
        self.instances: list[Instance] = []
        stores = {"store": self.store}
        if self.kind == "P D":
            pair = TieredPair(
                lambda wire: Stored(stores, num_pages=64, sender=wire),
                lambda wire: Stored(stores, num_pages=self.pages, receiver=wire),
            )
            self.instances, self.turn = [pair.prefill, pair.decode], pair.turn
        else:
            self.instances, self.turn = (
                [Stored(stores, self.pages, overlap=self.kind == "U, overlap")],
                self._turn_unified,
            )

    def _turn_unified(self) -> None:
        (instance,) = self.instances
        assert isinstance(instance, Stored)
        instance.pump()
        instance.scheduler.step()

    @property
    def sampler(self) -> Instance:
        return self.instances[-1]

    def submit(self, index: int, prompt: list[int], max_tokens: int, forks: tuple[Fork, ...] = ()) -> None:
        room, name, tokens = room_of(index), f"r{index}", pack_i32(prompt)
        sampling, more = SamplingParams(max_tokens, temperature=0.0), {"cache_salt": "", "weights": self.number}
        self.prompts |= dict.fromkeys([fork.room for fork in forks] or [room], prompt)
        if len(self.instances) == 2:
            self.sampler.scheduler.submit(decode_request(room, name, tokens, sampling, 0, 1, forks=forks, **more))
            self.instances[0].scheduler.submit(prefill_request(room, name, tokens, 0, 1, **more))
        else:
            self.sampler.scheduler.submit(unified_request(room, name, tokens, sampling, forks=forks, **more))

    def run(self) -> None:
        for _ in range(3000):
            if all(instance.scheduler.is_idle for instance in self.instances):
                self.turn()  # the last pages go to the store
                return
            self.turn()
        raise AssertionError(f"still busy: {[instance.scheduler.load for instance in self.instances]}")

    def note(self, instance: Instance) -> None:
        self.seen |= {state for state in S if instance.scheduler._sequences.of(state)}

    def change(self, instance: Instance, number: int, folder: int) -> None:
        self.note(instance)
        instance.change_weights(number, folder)

    def damage_and_flush(self, instance: Instance) -> None:
        """Damage every page in use, and flush the cache, as an operator does."""
        self.note(instance)
        instance.scheduler._inbox.put(partial(_damage, instance))
        instance.scheduler.flush_cache()

    def check(self, histories: Iterable[list[int]]) -> None:
        """Check that prompts which begin with these tokens get those of the weights that every process starts with."""
        prompts = [[*history, 5] for history in histories]
        for index, prompt in enumerate(prompts, OTHERS):
            self.submit(index, prompt, 2)
        self.run()
        for index, prompt in enumerate(prompts, OTHERS):
            found, right = self.sampler.tokens[room_of(index)], expected_tokens(prompt, 2, INFO.vocab_size)
            assert found == right, f"behind {len(prompt) - 1} tokens: {found}, not {right}"

    def check_all(self) -> None:
        """Check what is cached, here and behind a restart."""
        for instance in self.instances:
            instance.check_empty()
        histories = [[*prompt, *self.sampler.tokens[room]] for room, prompt in self.prompts.items()]
        assert all(self.sampler.finishes[room].reason == "length" for room in self.prompts)
        self.check(histories)
        World(self.store, self.kind, 64).check(histories)

    def begin(self) -> None:
        self.submit(1, SHORT, 40)
        self.submit(2, LONG, 20)
        self.submit(3, PATIENT, 12)
        self.submit(4, WITH_CHOICES, 12, CHOICES)


def _damage(instance: Instance) -> None:
    assert isinstance(instance.executor, Engine)
    for page in {page for room in instance.cache._rooms for page in instance.cache.get_page_indices(room)}:
        instance.executor.pool.kv[:, rows_of(page)] ^= 0x55


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.turn()


UNIFIED_STATES = {S.WAITING, S.COMPUTING, S.FORK_WAITING, S.FORK_HELD, S.RUNNING, S.RETRACTED}
PAIR_STATES = {*UNIFIED_STATES, S.INFLIGHT, S.TRANSFER, S.LOGITS, S.STARTED}
STATES = {"U": UNIFIED_STATES, "U, overlap": UNIFIED_STATES, "P D": PAIR_STATES}
KINDS = pytest.mark.parametrize("kind", STATES)


@KINDS
def test_what_runs_through_other_weights_and_back_is_cached_nowhere(kind: str) -> None:
    seen: set[SequenceState] = set()
    for before in range(0, 48, 2):
        world = World(MemoryStore(), kind)
        world.begin()
        turns(world, before)
        for number, folder in ((1, 1), (2, 0)):
            for instance in world.instances:
                world.change(instance, number, folder)
            turns(world, 1 + before % 4)
        world.number = 2
        world.run()
        world.check_all()
        seen |= world.seen
    assert seen >= STATES[kind]


@pytest.mark.parametrize("first", [0, 1], ids=["P first", "D first"])
def test_p_and_d_may_change_at_any_distance(first: int) -> None:
    """What P computes with weights that D does not have yet is not cached as that of the older ones."""
    for before in range(0, 36, 5):
        for distance in (1, 9, 200):
            world = World(MemoryStore(), "P D")
            world.begin()
            turns(world, before)
            for number, folder in ((1, 1), (2, 0)):
                for instance in world.instances[:: 1 if first == 0 else -1]:
                    world.change(instance, number, folder)
                    turns(world, distance)
            world.number = 2
            world.run()
            world.check_all()


@KINDS
def test_a_change_leaves_nothing_in_a_store_for_the_weights_before_it(kind: str) -> None:
    """Pages that entered the cache before the change are on their way to the store when it comes."""
    for before in range(0, 48, 5):
        world = World(MemoryStore(), kind)
        world.begin()
        turns(world, before)
        for instance in world.instances:
            world.change(instance, 1, 1)
        world.run()
        histories = [[*prompt, *world.sampler.tokens[room]] for room, prompt in world.prompts.items()]
        World(world.store, kind, 64).check(histories)


@KINDS
def test_what_used_damaged_pages_leaves_none_behind_a_flush(kind: str) -> None:
    """The same prompts come again at once, so their pages are cached anew while the first requests still run."""
    seen: set[SequenceState] = set()
    for before in range(2, 48, 5):
        world = World(MemoryStore(), kind)
        world.begin()
        turns(world, before)
        for instance in world.instances:
            world.damage_and_flush(instance)
        for index, prompt in enumerate((SHORT, LONG, WITH_CHOICES), 5):
            world.submit(index, prompt, 4)
        world.run()
        world.check_all()
        seen |= world.seen
    assert S.RETRACTED in seen


@pytest.mark.parametrize("kind", STATES)
def test_a_request_that_comes_after_the_change_is_cached(kind: str) -> None:
    world = World(MemoryStore(), kind)
    for number, folder in ((1, 1), (2, 0)):
        for instance in world.instances:
            world.change(instance, number, folder)
        turns(world, 1)
    world.number = 2
    world.submit(1, LONG, 4)
    world.run()
    history, cache = [*LONG, *world.sampler.tokens[room_of(1)]], world.sampler.cache
    names = names_of(Stored({}), history[:-1])
    assert sorted(world.store.records) == sorted(names), "the store has other pages than those of the request"
    assert cache.known_tokens(cache.page_keys(""), pack_i32(history)) == len(names) * PAGE_SIZE


def test_a_prompt_that_waited_takes_no_pages_of_the_weights_before() -> None:
    instance = Stored({"store": MemoryStore()})
    instance.ask(0, LONG)
    instance.evict()
    instance.cache.reserve(b"other", 12 * PAGE_SIZE)
    instance.submit(1, LONG)
    instance.step()
    assert len(instance.scheduler._sequences.of(S.WAITING)) == 1
    instance.change_weights(1, 1)
    instance.step()
    instance.cache.remove_task(b"other")
    instance.run()
    assert instance.tokens[room_of(1)] == expected_tokens(LONG, 3, INFO.vocab_size, adapter=1)
    assert instance.cached.get(room_of(1), 0) == 0 and not instance.copies.restored
    instance.check_empty()


def test_a_prompt_that_waited_through_a_flush_is_work_to_do_to_its_last_token() -> None:
    instance = Instance(20)
    instance.cache.reserve(b"other", 16 * PAGE_SIZE)
    tokens, sampling = pack_i32(LONG), SamplingParams(3, temperature=0.0)
    instance.scheduler.submit(unified_request(room_of(1), "r1", tokens, sampling, cache_salt=""))
    instance.scheduler.step()
    instance.scheduler.flush_cache()
    instance.scheduler.step()
    instance.cache.commit(b"other", instance.cache.page_keys(""), tokens, len(LONG))  # computed anew by another one
    instance.clock.advance(ESTIMATE_S)
    instance.scheduler.step()
    assert instance.scheduler.load.waiting_tokens == len(LONG)
    instance.cache.remove_task(b"other")
    instance.run()
    assert instance.cached.get(room_of(1), 0) == 0
    instance.check_empty()


def test_no_snapshot_is_kept_of_a_state_that_other_weights_made() -> None:
    for before in range(1, 8):
        instance, tokens = Instance(40, state_slots=4), pack_i32(prompt_of(1, 29))
        sampling = SamplingParams(3, temperature=0.0)
        instance.scheduler.submit(unified_request(room_of(1), "r", tokens, sampling, cache_salt=""))
        for _ in range(before):
            instance.scheduler.step()
        assert not instance.scheduler.is_idle
        for number, folder in ((1, 1), (2, 0)):
            instance.change_weights(number, folder)
            instance.scheduler.step()
        instance.run()
        known = instance.cache.known_tokens(instance.cache.page_keys(""), tokens)
        assert (instance.states.num_snapshots, known) == (0, 0), f"changed after {before} steps"
        instance.check_empty()


class AskedStore(MemoryStore):
    """A store that calls `then` when it is asked for the `num_left`-th time whether it has a page."""

    num_left = -1

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def may_have(self, key: bytes) -> bool:
        self.num_left -= 1
        if self.num_left == 0:
            self.then()
        return True


@pytest.mark.parametrize("num_left", [1, 2, 3], ids=["before the fetch", "at its first page", "at its second"])
def test_what_a_load_fetches_behind_a_flush_stays_nowhere(num_left: int) -> None:
    def flush() -> None:
        instance.scheduler.flush_cache()
        instance.step()

    store = AskedStore(flush)
    instance = Stored({"store": store})
    instance.ask(0, LONG)
    instance.evict()
    instance.submit(1, LONG)
    instance.step()
    store.num_left = num_left
    instance.run()
    instance.check(1, LONG)
    assert store.num_left <= 0 and len(instance.host) == 0 and not instance.copies.restored
    instance.check_empty()
