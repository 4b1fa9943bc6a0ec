"""The prefix cache in the step loop: what a prompt does not compute, who leaves what, and what is never left.

The executor refuses a chunk behind KV that is not that of its prompt, and a write to a page that somebody shares.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from test_pd_scheduler import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.kv_transfer.events import KVChunk
from chitu.protocol import CancelRequest, DecodeRequest, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.fake_executor import FakeExecutor, expected_tokens

GREEDY = SamplingParams(6, temperature=0.0)


def ask(
    instance: Instance, index: int, prompt: list[int], salt: str | None = "", sampling: SamplingParams = GREEDY
) -> None:
    room = room_of(index)
    instance.scheduler.submit(UnifiedRequest(room, f"r{index}", pack_i32(prompt), sampling, cache_salt=salt))


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
        known = len(prompt) + 5  # of the newest token there is no KV
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
        ask(instance, index, prompt_of(2, 21), None)  # takes none and leaves none
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
    """With a step in flight: its chunk was launched, and may be anything until it is read."""
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


class NotedPSide(PSide):
    """Where the chunks of all steps began."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.starts: list[int] = []

    def begin_step(self, chunks: Sequence[KVChunk]) -> None:
        self.starts += [chunk.start for chunk in chunks]


def test_p_computes_behind_what_it_has() -> None:
    wire, rng = Wire(), random.Random(1)
    side = NotedPSide(wire)
    prefill = wire.prefill = Instance(64, sender=side)
    decode = wire.decode = Instance(64, receiver=DSide(wire))
    prompt = prompt_of(1, 21)
    for index in range(2):
        half = DecodeRequest(room_of(index), f"r{index}", pack_i32(prompt), GREEDY, 0, 1)
        decode.scheduler.submit(half)
        prefill.scheduler.submit(PrefillRequest(half.room, half.request_id, half.token_ids, 0, 1, cache_salt="mine"))
        while room_of(index) not in decode.finishes:
            prefill.scheduler.step()
            decode.scheduler.step()
            wire.deliver(rng)
        assert decode.tokens[room_of(index)] == expected_tokens(prompt, 6, INFO.vocab_size)
    prefill.run()
    assert side.starts == [0, 5, 10, 15, 20, 20]
    assert prefill.scheduler.load.cached_tokens == 20
    prefill.check_empty()
    decode.check_empty()


class Refusing(FakeExecutor):
    """Raises for every plan that admits a prompt with 999."""

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
    """Six that begin alike and grow: more than there is room for, so some wait in host memory."""
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
