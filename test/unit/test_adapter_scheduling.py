"""LoRA adapters in the step loop: each request computes with its own, also after a retraction and as a fork, and no
page is shared between two adapters, or between one and the model alone.

The executor's KV depends on the adapter, and it refuses a chunk behind KV of another one.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import Admit
from chitu.errors import IncompatibleLayout
from chitu.fake.executor import FakeExecutor, InvariantViolation, expected_tokens
from chitu.kv_transfer.layout import check_compatible
from chitu.protocol import Fork, KVLayout, SamplingParams, pack_i32

ADAPTERS = (("sql", "1" * 32), ("tone", "2" * 32))
NUMBERS = {"": 0, "sql": 1, "tone": 2}
WITH_ADAPTERS = msgspec.structs.replace(INFO, adapters=ADAPTERS)
GREEDY = SamplingParams(6, temperature=0.0)


def unified(num_pages: int = 64, config: SchedulerConfig | None = None, overlap: bool = False) -> Instance:
    return Instance(num_pages, info=WITH_ADAPTERS, config=config, overlap=overlap)


def ask(
    instance: Instance, index: int, prompt: list[int], adapter: str, sampling: SamplingParams = GREEDY, **more: object
) -> None:
    request = unified_request(room_of(index), f"r{index}", pack_i32(prompt), sampling, adapter=adapter)
    instance.scheduler.submit(msgspec.structs.replace(request, **more))


def check(instance: Instance, index: int, prompt: list[int], adapter: str, sampling: SamplingParams = GREEDY) -> None:
    wanted = expected_tokens(prompt, sampling.max_tokens, INFO.vocab_size, sampling, NUMBERS[adapter])
    assert instance.tokens[room_of(index)] == wanted, (index, adapter)


def test_pages_are_shared_by_requests_of_one_adapter_alone() -> None:
    instance, prompt = unified(), prompt_of(1, 21)
    for index, (adapter, cached) in enumerate((("", 0), ("sql", 0), ("tone", 0), ("tone", 20), ("sql", 20), ("", 20))):
        ask(instance, index, prompt, adapter)
        instance.run()
        assert instance.cached.get(room_of(index), 0) == cached, adapter
        check(instance, index, prompt, adapter)
    instance.check_empty()


def test_a_page_that_two_adapters_share_is_noticed() -> None:
    """With one hash for both, their pages have the same keys."""
    info = msgspec.structs.replace(INFO, adapters=(("sql", "1" * 32), ("tone", "1" * 32)))
    instance, prompt = Instance(64, info=info), prompt_of(1, 21)
    ask(instance, 0, prompt, "sql")
    instance.run()
    ask(instance, 1, prompt, "tone")
    with pytest.raises(InvariantViolation):
        instance.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_requests_continue_with_their_adapters(overlap: bool) -> None:
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=7, reserved_decode_tokens=0)
    instance, sampling = unified(14, config, overlap), SamplingParams(24, temperature=0.0)
    adapters = ["sql", "", "tone", "sql", "tone"]
    for index, adapter in enumerate(adapters):
        ask(instance, index, prompt_of(index, 9), adapter, sampling)
    instance.run()
    assert instance.scheduler.load.retractions > 0
    for index, adapter in enumerate(adapters):
        check(instance, index, prompt_of(index, 9), adapter, sampling)
    instance.check_empty()


def test_every_choice_of_a_prompt_has_its_adapter() -> None:
    instance, sampling = unified(), SamplingParams(5, temperature=0.8)
    forks = tuple(Fork(room_of(10 + seed), f"c{seed}", seed) for seed in range(3))
    ask(instance, 0, prompt_of(1, 10), "tone", sampling, forks=forks)
    instance.run()
    for seed in range(3):
        check(instance, 10 + seed, prompt_of(1, 10), "tone", msgspec.structs.replace(sampling, seed=seed))


def test_an_unknown_adapter_is_refused_by_p_and_by_d() -> None:
    instance = unified()
    ask(instance, 0, prompt_of(1, 5), "poems")
    instance.run()
    finish = instance.finishes[room_of(0)]
    assert (finish.code, finish.message) == (
        "invalid_request",
        "this instance has no LoRA adapter 'poems' (model.adapters: sql, tone)",
    )
    wire = Wire()
    prefill = Instance(64, sender=PSide(wire))
    prefill.scheduler.submit(prefill_request(room_of(1), "r1", pack_i32([5, 6]), 0, 1, adapter="sql"))
    prefill.run()
    assert str(prefill.failures[room_of(1)]) == "this instance has no LoRA adapter 'sql' (model.adapters: none)"


def test_p_refuses_a_d_with_other_adapters() -> None:
    layout = msgspec.structs.replace(KVLayout.uniform("m", 1, 1, 2, PAGE_SIZE, "float32", 100), adapters=ADAPTERS)
    check_compatible(layout, msgspec.structs.replace(layout))
    for others in ((), ADAPTERS[:1], (("sql", "1" * 32), ("tone", "3" * 32))):
        with pytest.raises(IncompatibleLayout, match=r"KV layouts differ in adapters: .*tone.* != "):
            check_compatible(layout, msgspec.structs.replace(layout, adapters=others))


def test_p_and_d_compute_with_the_adapter_and_reuse_its_pages() -> None:
    wire, rng = Wire(), random.Random(1)
    prefill = wire.prefill = Instance(64, info=WITH_ADAPTERS, sender=PSide(wire))
    decode = wire.decode = Instance(64, info=WITH_ADAPTERS, receiver=DSide(wire))
    prompt = prompt_of(1, 4 * PAGE_SIZE + 1)
    for index, (adapter, computed) in enumerate((("sql", 17), ("tone", 17), ("", 17), ("sql", 1), ("tone", 1))):
        room, tokens = room_of(index), pack_i32(prompt)
        before = prefill.scheduler._load.prompt_tokens
        decode.scheduler.submit(decode_request(room, f"r{index}", tokens, GREEDY, 0, 1, adapter=adapter))
        prefill.scheduler.submit(prefill_request(room, f"r{index}", tokens, 0, 1, adapter=adapter))
        while room not in decode.finishes or not (decode.scheduler.is_idle and prefill.scheduler.is_idle):
            for instance in (prefill, decode):
                instance.scheduler.step()
            wire.deliver(rng)
        check(decode, index, prompt, adapter)
        assert prefill.scheduler._load.prompt_tokens - before == computed, adapter


class OfTheNeighbour(FakeExecutor):
    """An executor that computes with the other adapter."""

    def _admit(self, admit: Admit) -> None:
        super()._admit(msgspec.structs.replace(admit, adapter=3 - admit.adapter))


def test_the_adapter_of_the_neighbour_gives_other_tokens() -> None:
    instance = Instance(64, info=WITH_ADAPTERS, executor=OfTheNeighbour)
    ask(instance, 0, prompt_of(1, 9), "sql")
    instance.run()
    with pytest.raises(AssertionError):
        check(instance, 0, prompt_of(1, 9), "sql")
