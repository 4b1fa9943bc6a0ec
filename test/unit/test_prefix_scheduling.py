"""The prefix cache in the step loop: what a prompt does not compute, which requests leave pages, what is not cached.

The executor refuses a chunk behind KV of another prompt, and a write to a shared page.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import FirstToken, LayerCallback, StepPlan, StepResult
from chitu.fake.executor import FakeExecutor, expected_tokens
from chitu.instance.sequences import SequenceState
from chitu.kv_cache.prefix_index import PageKeys
from chitu.kv_transfer.chunks import KVChunk
from chitu.protocol import CancelRequest, SamplingParams, pack_i32

GREEDY = SamplingParams(6, temperature=0.0)


def ask(
    instance: Instance, index: int, prompt: list[int], salt: str | None = "", sampling: SamplingParams = GREEDY
) -> None:
    room = room_of(index)
    instance.scheduler.submit(unified_request(room, f"r{index}", pack_i32(prompt), sampling, cache_salt=salt))


def cached_tokens(instance: Instance, index: int) -> int:
    return instance.cached.get(room_of(index), 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_computes_only_its_new_pages(overlap: bool) -> None:
    instance = Instance(64, overlap=overlap)
    prompt, known = prompt_of(1, 21), 0
    for turn in range(4):
        before = instance.scheduler._load.prompt_tokens
        ask(instance, turn, prompt)
        instance.run()
        cached = known // PAGE_SIZE * PAGE_SIZE
        assert instance.tokens[room_of(turn)] == expected_tokens(prompt, 6, INFO.vocab_size)
        assert cached_tokens(instance, turn) == cached
        assert instance.scheduler._load.prompt_tokens - before == len(prompt) - cached
        known = len(prompt) + 5  # the newest token has no KV yet
        prompt = [*prompt, *instance.tokens[room_of(turn)], 5, 6, 7]
    instance.check_empty()


def test_a_prompt_that_is_known_to_its_last_token_computes_one_page() -> None:
    instance = Instance(64)
    for index in range(2):
        ask(instance, index, prompt_of(1, 4 * PAGE_SIZE))
        instance.run()
        assert instance.tokens[room_of(index)] == expected_tokens(prompt_of(1, 4 * PAGE_SIZE), 6, INFO.vocab_size)
    assert cached_tokens(instance, 1) == 3 * PAGE_SIZE


def test_other_salts_share_nothing_and_a_flush_forgets() -> None:
    instance = Instance(64)
    prompt = prompt_of(1, 21)
    for index, (salt, cached) in enumerate((("", 0), ("mine", 0), ("mine", 20), ("", 20))):
        ask(instance, index, prompt, salt)
        instance.run()
        assert cached_tokens(instance, index) == cached
    for index in (5, 6):
        ask(instance, index, prompt_of(2, 21), None)  # uses no cached pages and leaves none
        ask(instance, index + 2, prompt, None)
        instance.run()
        assert (cached_tokens(instance, index), cached_tokens(instance, index + 2)) == (0, 0)
    instance.scheduler.flush_cache()
    instance.run()
    load = instance.scheduler.load
    assert (load.pages_free, load.pages_cached, load.cached_tokens) == (64, 0, 40)
    ask(instance, 9, prompt)
    instance.run()
    assert cached_tokens(instance, 9) == 0


def test_what_a_cancelled_request_had_not_settled_is_not_there_for_others() -> None:
    """A step is in flight: its chunk was launched, and its pages may hold anything until the step is read."""
    instance = Instance(64, chunk=8, overlap=True)
    prompt = prompt_of(1, 40)
    ask(instance, 0, prompt)
    for _ in range(2):
        instance.scheduler.step()
    assert len(instance.late.unread) == 1
    instance.scheduler.submit(CancelRequest(room_of(0)))
    instance.run()
    ask(instance, 1, prompt)
    instance.run()
    assert cached_tokens(instance, 1) == 8
    assert instance.tokens[room_of(1)] == expected_tokens(prompt, 6, INFO.vocab_size)


class Pair:
    """P and D on a wire that never fails."""

    def __init__(self, executor: type[FakeExecutor] = FakeExecutor, pages_d: int = 64) -> None:
        self.wire, self.rng = Wire(), random.Random(1)
        self.side = NotedPSide(self.wire)
        self.prefill = self.wire.prefill = Instance(64, sender=self.side)
        self.decode = self.wire.decode = Instance(pages_d, receiver=DSide(self.wire), executor=executor)

    def submit(self, index: int, prompt: list[int], salt: str = "", sampling: SamplingParams = GREEDY) -> None:
        room, name, tokens = room_of(index), f"r{index}", pack_i32(prompt)
        self.decode.scheduler.submit(decode_request(room, name, tokens, sampling, 0, 1, cache_salt=salt))
        self.prefill.scheduler.submit(prefill_request(room, name, tokens, 0, 1, cache_salt=salt))

    def turn(self) -> None:
        self.prefill.scheduler.step()
        self.decode.scheduler.step()
        self.wire.deliver(self.rng)

    def ask(self, index: int, prompt: list[int], salt: str = "") -> int:
        """Serve a request and return how many pages of its prompt D had cached."""
        self.submit(index, prompt, salt)
        while room_of(index) not in self.decode.finishes or not self.decode.scheduler.is_idle:
            self.turn()
        assert self.decode.tokens[room_of(index)] == expected_tokens(prompt, 6, INFO.vocab_size)
        return self.wire.prefix_pages[room_of(index)]


class NotedPSide(PSide):
    """P's side of a wire that notes where the chunks of all steps began."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.starts: list[int] = []

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        self.starts += [chunk.start for chunk in chunks]


def test_p_computes_behind_what_it_has() -> None:
    pair = Pair()
    prompt = prompt_of(1, 21)
    for index in range(2):
        pair.ask(index, prompt, "mine")
    pair.prefill.run()
    assert pair.side.starts == [0, 5, 10, 15, 20, 20]
    assert pair.prefill.scheduler.load.cached_tokens == 20
    pair.prefill.check_empty()
    pair.decode.check_empty()


def test_d_announces_what_it_has_of_prompt_and_answer() -> None:
    pair = Pair()
    prompt, known = prompt_of(1, 21), 0
    for turn in range(4):
        assert pair.ask(turn, prompt) == known // PAGE_SIZE
        known = len(prompt) + 5  # the newest token has no KV yet
        prompt = [*prompt, *pair.decode.tokens[room_of(turn)], 5, 6, 7]
    assert pair.ask(8, prompt, "mine") == 0
    pair.decode.scheduler.flush_cache()
    assert pair.ask(9, prompt) == 0
    pair.decode.check_empty()


def test_d_may_have_the_whole_prompt_and_still_gets_the_logits() -> None:
    pair = Pair()
    prompt = prompt_of(1, 4 * PAGE_SIZE)
    assert [pair.ask(index, prompt) for index in range(2)] == [0, 4]
    pair.decode.check_empty()


def test_what_d_announced_is_not_evicted_before_the_end_however_short_pages_run() -> None:
    """The prefix belongs to a request whose P is silent, while another request needs every page that there is."""
    pair = Pair(pages_d=16)
    prompt = prompt_of(1, 21)
    pair.ask(0, prompt)
    pair.submit(1, prompt)
    pair.decode.scheduler.step()  # P has not even received the request
    assert pair.wire.prefix_pages[room_of(1)] == 5
    held = list(pair.decode.cache.get_page_indices(room_of(1)))
    other = room_of(2)
    pair.decode.cache.reserve(other, pair.decode.cache.num_available_pages * PAGE_SIZE)
    assert not set(held) & set(pair.decode.cache.get_page_indices(other)) and pair.decode.cache.evictions == 1
    pair.decode.cache.remove_task(other)
    while not pair.decode.scheduler.is_idle:
        pair.turn()
    assert pair.decode.tokens[room_of(1)] == expected_tokens(prompt, 6, INFO.vocab_size)
    pair.decode.check_empty()


@pytest.mark.parametrize("fate", ["fails", "is cancelled"])
def test_of_a_transfer_that_does_not_end_well_d_keeps_nothing(fate: str) -> None:
    pair = Pair()
    prompt = prompt_of(1, 21)
    if fate == "fails":
        pair.wire.failing.add(room_of(0))
    pair.submit(0, prompt)
    while not pair.decode.scheduler._sequences.of(SequenceState.TRANSFER):
        pair.turn()
    if fate == "is cancelled":
        for instance in (pair.prefill, pair.decode):
            instance.scheduler.submit(CancelRequest(room_of(0)))
    while not pair.decode.scheduler.is_idle or not pair.prefill.scheduler.is_idle:
        pair.turn()
    assert pair.decode.scheduler.load.pages_cached == 0
    assert pair.ask(1, prompt) == 0
    pair.decode.check_empty()


def test_an_answer_that_ends_before_its_prompt_has_landed_leaves_the_prompt() -> None:
    pair = Pair()
    prompt = prompt_of(1, 21)
    stop = expected_tokens(prompt, 1, INFO.vocab_size)[0]
    pair.submit(0, prompt, sampling=SamplingParams(6, temperature=0.0, stop_token_ids=(stop,)))
    while not pair.decode.scheduler.is_idle or room_of(0) not in pair.decode.finishes:
        pair.turn()
    assert len(pair.decode.tokens[room_of(0)]) == 1 and pair.decode.scheduler.load.pages_cached == 5
    assert pair.ask(1, prompt) == 5


def test_a_request_for_one_token_moves_no_pages_and_leaves_none() -> None:
    pair = Pair()
    prompt = prompt_of(1, 21)
    for index in range(2):
        pair.submit(index, prompt, sampling=SamplingParams(1, temperature=0.0))
        while not pair.decode.scheduler.is_idle or room_of(index) not in pair.decode.finishes:
            pair.turn()
        assert pair.wire.prefix_pages[room_of(index)] == pair.decode.scheduler.load.pages_cached == 0
    pair.decode.check_empty()


class Breaking(FakeExecutor):
    """An executor in which every first token raises once `is_broken` is set."""

    is_broken = False

    def _first_token(self, first: FirstToken, result: StepResult) -> None:
        super()._first_token(first, result)
        if self.is_broken:
            raise IndexError("index 999 is out of bounds")


def test_what_proves_that_d_is_sound_writes_to_no_page_that_is_cached() -> None:
    """All pages of the prompt are cached when its first token raises, so the probe takes another page."""
    pair = Pair(executor=Breaking)
    prompt = prompt_of(1, 4 * PAGE_SIZE)
    assert pair.ask(0, prompt) == 0
    executor = pair.decode.executor
    assert isinstance(executor, Breaking)
    executor.is_broken = True
    pair.submit(1, prompt)
    while room_of(1) not in pair.decode.finishes or not pair.decode.scheduler.is_idle:
        pair.turn()
    assert pair.decode.finishes[room_of(1)].code == "step_failed"
    executor.is_broken = False
    pages = pair.decode.cache._index.find(PageKeys.of(b"model", PAGE_SIZE).upto(4, pack_i32(prompt)))
    assert len(pages) == 4 and executor._holds(pages, prompt)
    assert pair.ask(2, prompt) == 4
    pair.decode.check_empty()


class Refusing(FakeExecutor):
    """An executor that raises for every plan that admits a prompt with token 999."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        if any(999 in memoryview(admit.token_ids).cast("i") for admit in plan.admit):
            raise IndexError("index 999 is out of bounds")
        return super().execute(plan, on_layer)


def test_what_proves_that_the_device_is_sound_writes_to_no_page_that_others_share() -> None:
    """A request that raises alone is replaced by one token, which is computed into a page of its own."""
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=64, chunk_size=64, reserved_decode_tokens=4)
    instance = Instance(64, executor=Refusing, config=config)
    prompt = prompt_of(1, 21)
    ask(instance, 0, prompt)
    instance.run()
    ask(instance, 1, [*prompt, 999])
    instance.run()
    assert instance.finishes[room_of(1)].code == "step_failed"
    ask(instance, 2, prompt)
    instance.run()
    assert instance.tokens[room_of(2)] == expected_tokens(prompt, 6, INFO.vocab_size)
    assert cached_tokens(instance, 2) == 20
    instance.check_empty()


def test_requests_that_share_pages_run_to_their_end_when_pages_run_short() -> None:
    """Six requests share a prefix and outgrow the pool, so some wait in host memory."""
    instance = Instance(26)
    prompts = [[*prompt_of(0, 16), 100 + index] for index in range(6)]
    long = SamplingParams(40, temperature=0.0)
    ask(instance, 99, prompt_of(0, 17))
    instance.run()
    for index, prompt in enumerate(prompts):
        ask(instance, index, prompt, sampling=long)
    instance.run()
    for index, prompt in enumerate(prompts):
        assert instance.tokens[room_of(index)] == expected_tokens(prompt, 40, INFO.vocab_size)
        assert cached_tokens(instance, index) == 16
    assert instance.scheduler.load.retractions and instance.scheduler.load.evictions
    instance.check_empty()
