"""Requests whose grammar is compiled in a thread: they hold nothing meanwhile, and start or end when it is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

from scheduler_world import Instance, prompt_of, room_of

from chitu.engine.executor import LayerCallback, StepPlan, StepResult
from chitu.errors import Capacity, ChituError, InvalidRequest
from chitu.grammars import CompiledGrammar, GrammarStore
from chitu.grammars.store import Outcome
from chitu.pd_scheduler import PDScheduler
from chitu.protocol import CancelRequest, Fork, Grammar, SamplingParams, UnifiedRequest, pack_i32
from chitu.testing.fake_executor import FakeExecutor

GRAMMAR = Grammar("regex", "a+")


class Store:
    """A store that compiles when the test asks."""

    def __init__(self) -> None:
        self.futures: dict[Grammar, Future[Outcome]] = {}
        self.outcomes: dict[Grammar, Outcome] = {}
        self.refusal: ChituError | None = None

    def find(self, grammar: Grammar) -> Outcome | None:
        return self.outcomes.get(grammar)

    def submit(self, grammar: Grammar) -> Future[Outcome]:
        if self.refusal is not None:
            raise self.refusal
        return self.futures.setdefault(grammar, Future())

    def finish(self, grammar: Grammar, outcome: Outcome | None = None) -> None:
        self.outcomes[grammar] = outcome or cast(CompiledGrammar, CompiledGrammar.__new__(CompiledGrammar))
        self.futures.pop(grammar).set_result(self.outcomes[grammar])


def instance_with(store: Store) -> Instance:
    return Instance(16, grammars=cast(GrammarStore, store))


def ask(instance: Instance, index: int, grammar: Grammar | None = GRAMMAR, worker: int = 0) -> None:
    sampling = SamplingParams(4, temperature=0.0, grammar=grammar, ignore_eos=True)
    prompt = pack_i32(prompt_of(index, 6))
    instance.scheduler.submit(
        UnifiedRequest(room_of(index), f"r{index}", prompt, sampling, 0, worker, 5000 if worker else 0)
    )


def test_it_waits_for_its_grammar_and_others_do_not() -> None:
    store = Store()
    instance = instance_with(store)
    ask(instance, 1)
    ask(instance, 2, None)
    for _ in range(20):
        instance.scheduler.step()
    assert room_of(2) in instance.finishes and room_of(1) not in instance.tokens
    assert not instance.scheduler.is_idle, "an instance that drains waits for it"
    ask(instance, 1)  # the same request again
    store.finish(GRAMMAR)
    ask(instance, 3)
    instance.run()
    assert {instance.finishes[room_of(index)].reason for index in (1, 2, 3)} == {"length"}
    assert [len(instance.tokens[room_of(index)]) for index in (1, 2, 3)] == [4, 4, 4]
    instance.check_empty()


def test_one_that_cannot_be_compiled_or_has_to_wait_too_long_ends_with_its_error() -> None:
    store = Store()
    instance = instance_with(store)
    ask(instance, 1)
    instance.scheduler.step()
    store.finish(GRAMMAR, InvalidRequest("regex: no"))
    instance.run()
    assert (instance.finishes[room_of(1)].code, instance.finishes[room_of(1)].message) == (
        "invalid_request",
        "regex: no",
    )
    store.refusal = Capacity("256 grammars wait to be compiled already")
    ask(instance, 2, Grammar("regex", "b"))
    instance.run()
    assert instance.finishes[room_of(2)].code == "capacity"
    without = Instance(16)
    ask(without, 3)
    without.run()
    assert without.finishes[room_of(3)].code == "invalid_request"
    for each in (instance, without):
        assert not each.tokens
        each.check_empty()


def test_one_that_is_cancelled_or_whose_router_is_gone_meanwhile_does_not_come() -> None:
    ways: list[Callable[[PDScheduler], None]] = [
        lambda scheduler: scheduler.submit(CancelRequest(room_of(1))),
        lambda scheduler: scheduler.cancel_all(),
        lambda scheduler: scheduler.cancel_worker(7),
    ]
    for way in ways:
        store = Store()
        instance = instance_with(store)
        ask(instance, 1, worker=7)
        instance.scheduler.step()
        way(instance.scheduler)
        instance.scheduler.step()
        store.finish(GRAMMAR)
        instance.run()
        assert not instance.tokens and not instance.finishes and not instance.ports
        instance.check_empty()


def test_a_fork_that_is_cancelled_meanwhile_does_not_come_and_the_others_do() -> None:
    store = Store()
    instance = Instance(32, grammars=cast(GrammarStore, store))
    sampling = SamplingParams(4, temperature=0.0, grammar=GRAMMAR, ignore_eos=True)
    forks = tuple(Fork(room_of(index), f"r{index}", index) for index in (1, 2, 3))
    instance.scheduler.submit(UnifiedRequest(room_of(9), "prompt", pack_i32(prompt_of(1, 6)), sampling, forks=forks))
    instance.scheduler.step()
    instance.scheduler.submit(CancelRequest(room_of(2)))
    instance.scheduler.step()
    store.finish(GRAMMAR)
    instance.run()
    assert set(instance.tokens) == set(instance.finishes) == {room_of(1), room_of(3)}
    instance.scheduler.submit(
        UnifiedRequest(room_of(19), "prompt", pack_i32(prompt_of(2, 6)), sampling, forks=(Fork(room_of(11), "r", 1),))
    )
    instance.run()
    assert room_of(11) in instance.finishes
    instance.check_empty()


class FailingExecutor(FakeExecutor):
    """An executor in which the first slot that samples cannot follow its grammar any further."""

    slot = -1

    def execute(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        result = super().execute(plan, on_layer)
        if result.slots and self.slot < 0:
            self.slot = result.slots[0]
            result.failures = {self.slot: "nothing follows"}
        return result


def test_a_token_that_follows_no_grammar_ends_its_request_alone() -> None:
    instance = Instance(16, executor=FailingExecutor)
    for index in (1, 2):
        ask(instance, index, None)
    instance.run()
    failed, whole = sorted(instance.finishes.values(), key=lambda finish: finish.reason)
    assert (failed.reason, failed.code, failed.message) == ("error", "invalid_request", "nothing follows")
    assert failed.room not in instance.tokens
    assert whole.reason == "length" and len(instance.tokens[whole.room]) == 4
    instance.check_empty()
