"""LoRA adapters in the step loop: each request computes with its own, also after a retraction and as a fork, and no
page is shared between two adapters, or between one and the model alone.

The executor's KV depends on the adapter, and it refuses a chunk behind KV of another one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest
from scheduler_world import INFO, PAGE_SIZE, DSide, Instance, PSide, Wire, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.config.schema import SchedulerConfig
from chitu.engine.executor import Admit, LayerCallback, StepPlan, StepResult
from chitu.errors import IncompatibleLayout
from chitu.fake.executor import FakeExecutor, InvariantViolation, check_plan, expected_tokens
from chitu.instance.adapters import AdapterTable
from chitu.kv_transfer.layout import check_compatible
from chitu.protocol import Fork, KVLayout, SamplingParams, pack_i32
from chitu.protocol.weights import ServedAdapter, Weights, WeightsOrder

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


# ------------------------------------------------------------------------------------------ lists that change meanwhile


class Loaded(FakeExecutor):
    """An executor that computes with loaded adapters alone, not with what a slot has had."""

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        result = super().execute(plan, on_layer)
        for slot in (*plan.decode, *(chunk.slot for chunk in plan.prefill)):
            if slot in self._slots:
                check_plan(self._slots[slot].adapter in self.adapters, f"slot {slot} computes with an unloaded adapter")
        return result


def serve(instance: Instance, number: int, *listed: tuple[str, str]) -> None:
    """Let the cluster serve this list from now on: names and hashes, each of which is its folder, too."""
    adapters = tuple([ServedAdapter(name, found, found) for name, found in sorted(listed)])
    instance.scheduler.weights.set_order(WeightsOrder(Weights(number, is_mixed=True, adapters=adapters)))


SQL2 = ("sql", "3" * 32)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_runs_keeps_its_adapter_over_changes_and_is_the_last_to_need_it(overlap: bool) -> None:
    instance, sampling = (
        Instance(64, info=WITH_ADAPTERS, executor=Loaded, overlap=overlap),
        SamplingParams(60, ignore_eos=True, temperature=0.0),
    )
    keeper, prompt = instance.scheduler.weights, prompt_of(1, 21)
    for index, adapter in enumerate(("", "sql", "tone")):
        ask(
            instance,
            index,
            prompt,
            adapter,
            sampling,
        )
    for _ in range(12):
        instance.scheduler.step()
    serve(instance, 1, SQL2)
    for _ in range(4):
        instance.scheduler.step()
    assert keeper.serves.number == 1 and instance.executor.adapters == {0, 1, 2, 3}
    assert sorted(keeper.report.leaving) == [("sql", 1), ("tone", 1)]
    for index, (adapter, weights, found, code) in enumerate(
        (
            ("sql", 0, "", "weights_changed"),
            ("sql", 1, "1" * 32, "weights_changed"),
            ("tone", 1, "", "invalid_request"),
        ),
        10,
    ):
        late = unified_request(room_of(index), "late", pack_i32(prompt), GREEDY, adapter=adapter, adapter_hash=found)
        instance.scheduler.submit(
            msgspec.structs.replace(late, head=msgspec.structs.replace(late.head, weights=weights))
        )
        instance.scheduler.step()
        assert instance.finishes[room_of(index)].code == code
    new = unified_request(room_of(20), "new", pack_i32(prompt), GREEDY, adapter="sql", adapter_hash=SQL2[1])
    instance.scheduler.submit(msgspec.structs.replace(new, head=msgspec.structs.replace(new.head, weights=1)))
    instance.run()
    for index, number in enumerate((0, 1, 2)):
        wanted = expected_tokens(prompt, 60, INFO.vocab_size, sampling, number)
        assert instance.tokens[room_of(index)] == wanted
    assert instance.tokens[room_of(20)] == expected_tokens(prompt, 6, INFO.vocab_size, GREEDY, 3)
    assert room_of(20) not in instance.cached, "pages of the old content"
    assert keeper.report.leaving == () and instance.executor.adapters == {0, 3}


def test_a_change_of_adapters_empties_no_cache() -> None:
    instance, prompt = Instance(64, info=WITH_ADAPTERS, executor=Loaded), prompt_of(1, 21)

    def cached_of(index: int, adapter: str, weights: int) -> int:
        request = unified_request(room_of(index), f"r{index}", pack_i32(prompt), GREEDY, adapter=adapter)
        instance.scheduler.submit(
            msgspec.structs.replace(request, head=msgspec.structs.replace(request.head, weights=weights))
        )
        instance.run()
        return instance.cached.get(room_of(index), 0)

    assert [cached_of(index, adapter, 0) for index, adapter in enumerate(("", "sql", "tone"))] == [0, 0, 0]
    serve(instance, 1, ADAPTERS[1])
    instance.scheduler.step()
    assert [cached_of(10 + index, adapter, 1) for index, adapter in enumerate(("", "tone"))] == [20, 20]
    assert instance.executor.adapters == {0, 2}


def test_a_retracted_request_goes_on_with_an_adapter_that_left() -> None:
    config = SchedulerConfig(max_running_requests=8, max_batched_tokens=16, chunk_size=7, reserved_decode_tokens=0)
    instance = Instance(14, info=WITH_ADAPTERS, config=config, executor=Loaded)
    sampling, adapters = SamplingParams(24, temperature=0.0), ["sql", "", "tone", "sql", "tone"]
    for index, adapter in enumerate(adapters):
        ask(instance, index, prompt_of(index, 9), adapter, sampling)
    while not instance.scheduler.load.retractions:
        instance.scheduler.step()
    serve(instance, 1)
    instance.run()
    for index, adapter in enumerate(adapters):
        check(instance, index, prompt_of(index, 9), adapter, sampling)
    instance.scheduler.step()
    assert instance.executor.adapters == {0}


class Forgetful(AdapterTable):
    """A table that gives back adapters at once."""

    def take_unused(self, num_requests: Mapping[int, int]) -> list[int]:
        return super().take_unused({})


def test_an_adapter_that_is_given_back_too_early_is_noticed() -> None:
    instance = Instance(64, info=WITH_ADAPTERS, executor=Loaded)
    instance.scheduler.weights.adapters.__class__ = Forgetful
    ask(instance, 0, prompt_of(1, 9), "sql", SamplingParams(60, ignore_eos=True))
    for _ in range(6):
        instance.scheduler.step()
    serve(instance, 1)
    with pytest.raises(InvariantViolation, match="computes with an unloaded adapter"):
        instance.run()


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
