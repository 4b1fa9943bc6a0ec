"""Members of a group that share experts step together, whatever each of them does besides: with requests, without, with
weights that change, frozen. Each is a real scheduler in a thread; their executors compute nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from scheduler_world import Instance
from support.lockstep import NO_SHAPES, PATIENCE_S, Table
from support.requests import unified_request

from chitu.engine.executor import Draft, PrefillChunk, StepPlan, StepSizes
from chitu.engine.lockstep import LockstepExecutor, Turn
from chitu.engine.waves import Wave
from chitu.errors import Internal
from chitu.fake.executor import FakeExecutor
from chitu.protocol import SamplingParams, pack_i32
from chitu.protocol.weights import Pause, Weights, WeightsOrder

NUM_TOKENS = 12


class Group:
    """Members whose step threads run until `close`."""

    def __init__(self, size: int = 2, overlap: bool = False, executor: type[FakeExecutor] = FakeExecutor) -> None:
        self.turns: list[list[Turn]] = []
        self.weights: list[list[int]] = []
        """Weights of every member in each turn."""
        self.table = Table(size, self._note)
        self.members = [
            Instance(64, overlap=overlap, executor=executor, join=lambda inner, rank=rank: self.table.join(rank, inner))
            for rank in range(size)
        ]
        self.at_turn: Callable[[], None] = lambda: None
        """Called once every member has said its turn, before any computes."""
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.members]
        for thread in self._threads:
            thread.start()

    def _note(self, turns: list[Turn]) -> None:
        self.turns.append(turns)
        self.weights.append([member.executor.weights for member in self.members])
        self.at_turn()

    def _run(self, member: Instance) -> None:
        lockstep = member.scheduler._lockstep
        assert lockstep is not None
        try:
            while not self._stop.is_set() or lockstep.must_step:
                if not member.scheduler.step():
                    time.sleep(0.0005)
        except BaseException as error:
            self.errors.append(error)
            self.table.abort()

    def ask(self, rank: int, prompt_len: int = 9, num_tokens: int = NUM_TOKENS) -> bytes:
        """Send a request to a member; return its room."""
        room = random.randbytes(16)
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        prompt, scheduler = pack_i32(range(10, 10 + prompt_len)), self.members[rank].scheduler
        scheduler.submit(unified_request(room, "r", prompt, sampling, weights=scheduler.weights.serves.number))
        return room

    def wait(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not is_so():
            assert not self.errors, self.errors
            assert time.monotonic() < end_s, "a member waits for another one"
            time.sleep(0.001)

    def finish(self, rank: int, room: bytes) -> None:
        """Wait for the end of a request."""
        self.wait(lambda: room in self.members[rank].finishes)
        assert len(self.members[rank].tokens[room]) == NUM_TOKENS

    def order(self, rank: int, order: WeightsOrder) -> None:
        self.members[rank].scheduler.weights.set_order(order)

    def close(self) -> None:
        """End all threads, as instances end that are drained: in no wave."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a member waits for another one"
        assert not self.errors, self.errors
        for member in self.members:
            lockstep = member.scheduler._lockstep
            assert lockstep is not None and not lockstep.must_step
            member.check_empty()


def test_members_without_requests_lend_and_count_no_steps() -> None:
    group = Group(3)
    group.finish(0, group.ask(0))
    group.wait(lambda: not any(wave.is_on for wave in group.table.waves))
    steps = group.members[0].scheduler.load.steps
    assert steps >= NUM_TOKENS and [member.scheduler.load.steps for member in group.members[1:]] == [0, 0]
    assert [turn[0].prompt_rows + turn[0].decode_rows > 0 for turn in group.turns] == [True] * (
        len(group.turns) - 1
    ) + [False], "the first turn without rows ends the wave"
    group.finish(2, group.ask(2))
    assert {turn[1].prompt_rows + turn[1].decode_rows for turn in group.turns} == {0}
    group.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_all_members_run_at_once(overlap: bool) -> None:
    group = Group(3, overlap)
    rooms = [(rank, group.ask(rank, prompt_len=3 + 7 * rank)) for rank in (0, 1, 2, 0, 1)]
    for rank, room in rooms:
        group.finish(rank, room)
    group.close()
    assert all(len({turn.wave for turn in turns}) == 1 for turns in group.turns)


class Script:
    """Agreement and bells of a member whose two neighbours compute the same in every turn."""

    def __init__(self, others: tuple[StepSizes, StepSizes]) -> None:
        self._others = others

    def turns(self, mine: Turn) -> list[Turn]:
        first, last = (
            mine._replace(prompt_rows=each.prompt_rows, decode_rows=each.decode_rows) for each in self._others
        )
        return [first, mine, last]

    def ring(self, wave: int) -> None: ...

    def silence(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("others", [(StepSizes(5, 0), StepSizes(0, 3)), (StepSizes(), StepSizes(2, 2))])
def test_a_member_knows_what_the_others_compute_in_its_turn(others: tuple[StepSizes, StepSizes]) -> None:
    script = Script(others)
    member = Instance(64, join=lambda inner: LockstepExecutor(inner, NO_SHAPES, script, script, Wave()))
    engine = member.scheduler._core.engine
    assert list(engine.others) == []
    assert isinstance(engine.lockstep, LockstepExecutor)
    engine.lockstep.lend()
    assert tuple(engine.others) == others, "those of its own are left out once"


def test_a_frozen_member_lends() -> None:
    group, is_frozen = Group(), threading.Event()

    def freeze() -> None:
        """At the first turn after a token: a thread of the test might come after the last."""
        if group.members[0].tokens and not is_frozen.is_set():
            group.order(0, WeightsOrder(pause=Pause(1, "keep")))
            is_frozen.set()

    group.at_turn = freeze
    kept = group.ask(0)
    group.wait(is_frozen.is_set)
    group.finish(1, group.ask(1))
    assert kept not in group.members[0].finishes
    group.order(0, WeightsOrder(pause=Pause(2, "")))
    group.finish(0, kept)
    group.close()


def test_weights_change_on_all_members_between_the_same_two_turns() -> None:
    """Views come to the members at different times, while requests run or after they have ended."""
    for is_mixed in (True, False):
        group, source = Group(3), random.Random(5)
        for number in range(1, 9):
            weights = Weights(number, str(number), str(number), is_mixed=is_mixed)
            rooms = [(rank, group.ask(rank)) for rank in range(3) if source.random() < 0.7]
            for rank in source.sample(range(3), 3):
                time.sleep(source.random() * 0.004)
                group.order(rank, WeightsOrder(weights))
            group.wait(lambda: all(each.executor.weights == number for each in group.members))  # noqa: B023
            for rank, room in rooms:
                group.wait(lambda: room in group.members[rank].finishes or room in group.members[rank].failures)  # noqa: B023
        group.close()
        assert all(len(set(weights)) == 1 for weights in group.weights)
        if not is_mixed:  # then no request has tokens of two
            changes = [at for at in range(1, len(group.weights)) if group.weights[at] != group.weights[at - 1]]
            assert all(not any(turn.decode_rows for turn in group.turns[at - 1]) for at in changes)


def test_a_member_that_cannot_read_the_weights_keeps_all_at_the_old_ones() -> None:
    group = Group()
    group.order(0, WeightsOrder(Weights(1, "1", "1")))
    group.finish(1, group.ask(1))
    assert [member.executor.weights for member in group.members] == [0, 0]
    group.order(1, WeightsOrder(Weights(1, "1", "1")))
    group.wait(lambda: [member.executor.weights for member in group.members] == [1, 1])
    group.close()


def test_a_newer_order_behind_an_agreement_waits_for_the_change() -> None:
    """The order comes to one member when all have agreed, and no member has changed yet."""
    group = Group()

    def note(turns: list[Turn]) -> None:
        Group._note(group, turns)
        if all(turn.weights for turn in turns):
            group.order(0, WeightsOrder(Weights(2, "2", "2")))

    group.table._note = note
    for rank in range(2):
        group.order(rank, WeightsOrder(Weights(1, "1", "1")))
    group.wait(lambda: [member.executor.weights for member in group.members] == [1, 1])
    group.order(1, WeightsOrder(Weights(2, "2", "2")))
    group.wait(lambda: [member.executor.weights for member in group.members] == [2, 2])
    group.close()
    assert all(len(set(weights)) == 1 for weights in group.weights)


def test_a_step_that_raises_ends_the_group() -> None:
    class Raising(FakeExecutor):
        def execute(self, plan: StepPlan, on_layer: object = None) -> object:  # type: ignore[override]
            if plan.prefill:
                raise RuntimeError("a step raises")
            return super().execute(plan)

    group = Group(executor=Raising)
    group.ask(0)
    end_s = time.monotonic() + PATIENCE_S
    while len(group.errors) < 1:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert any(isinstance(error, Internal) and "one member of a group" in error.message for error in group.errors)


def test_sizes_count_the_rows_of_drafts() -> None:
    plan = StepPlan(prefill=[PrefillChunk(0, 0, 7), PrefillChunk(1, 3, 2)], decode=[2, 3], drafts=[Draft(3, (5, 6))])
    assert plan.rows == StepSizes(9, 4)
