"""The machine of a request on the router: every event in every state does what the table defines and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_world import LAYOUT

from chitu.config.schema import RetryConfig, RouterConfig
from chitu.errors import DecodeLost, InvalidRequest, NoInstance, PrefillLost, RequestLost, TransferFailed
from chitu.protocol import Finish, InstanceInfo, SamplingParams, pack_i32
from chitu.protocol.account import RequestState, StageTimes
from chitu.router.candidates import InstanceKey, Way, instance_key
from chitu.router.generation import (
    GENERATION_TRANSITIONS,
    RUNNING,
    GenerateRequest,
    Generation,
    GenerationEvent,
    GenerationState,
    PromptGroup,
)
from chitu.router.request import (
    AttemptFailed,
    Begin,
    Blame,
    Cancel,
    Choose,
    CountServed,
    CountStarted,
    Effect,
    Ended,
    Event,
    Finished,
    GenerationMachine,
    GivenUp,
    InstanceLost,
    NoPair,
    NotDelivered,
    OutOfTime,
    PairChosen,
    ReaderGone,
    Silent,
    TokenCameEarly,
    TokensBegan,
)
from chitu.router.retry import MAX_DEATHS, Failure
from chitu.types import Role

E, S = GenerationEvent, GenerationState
INSTANCES = [
    InstanceInfo(role, rank, 1 + rank + 10 * (role is Role.DECODE), "127.0.0.1", 1, 2, LAYOUT, 512)
    for role in (Role.PREFILL, Role.DECODE)
    for rank in (0, 1, 2)
]
PAIRS = [Way(INSTANCES[rank], INSTANCES[3 + rank]) for rank in range(3)]
P, D, STRANGER = instance_key(INSTANCES[0]), instance_key(INSTANCES[3]), InstanceKey(Role.PREFILL, 7, 77)
NOW_S, END_S = 100.0, 160.0
OVER = (S.FINISHED, S.FAILED, S.CANCELLED)


FAILED_DRAFTS = (("prediction", 4, 3), ("text", 2, 0))
DRAFTS = (("text", 5, 5),)


class World:
    def __init__(self, **config: Any) -> None:
        self.machine = GenerationMachine(RouterConfig(request_timeout_s=END_S - NOW_S, **config))
        request = GenerateRequest("id", pack_i32([1, 2, 3]), 3, SamplingParams(max_tokens=4), stop_ids=frozenset({9}))
        self.generation = Generation(request, lambda: None, END_S, NOW_S)
        self.rooms = 0
        self.now_s = NOW_S
        self.effects: list[Effect] = []

    @property
    def state(self) -> GenerationState:
        return self.generation.state

    def give(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(self.generation, event, self.now_s)
        self.effects += effects
        return effects

    def chosen(self, pair: int = 0, **more: Any) -> PairChosen:
        """Return a choice of `pair` for the latest `Choose` effect, or for the request itself if there is none."""
        self.rooms += 1
        asked = [effect for effect in self.effects if isinstance(effect, Choose)]
        token_ids = asked[-1].token_ids if asked else self.generation.request.token_ids
        more.setdefault("failure", asked[-1].failure if asked else None)
        return PairChosen(PAIRS[pair], b"%016d" % self.rooms, token_ids, **more)

    def no_pair(self) -> NoPair:
        return NoPair(next(e.failure for e in reversed(self.effects) if isinstance(e, Choose)))

    def emit(self, *tokens: int) -> list[Effect]:
        self.generation.tokens += tokens
        return self.give(TokensBegan())

    def emit_early(self, token: int) -> list[Effect]:
        self.generation.tokens.append(token)
        return self.give(TokenCameEarly())

    def begun(self) -> list[int]:
        """Return the numbers of the attempts."""
        return [effect.attempt.number for effect in self.effects if isinstance(effect, Begin)]

    def ended(self) -> list[RequestState]:
        return [effect.record.state for effect in self.effects if isinstance(effect, Ended)]

    def in_hand(self) -> int:
        """Return how many attempts began and did not end."""
        return len(self.begun()) - len(self.ended())


FAILS = AttemptFailed(TransferFailed("x"), D)
ROAD: dict[GenerationState, Callable[[World], object]] = {
    S.PREFILL: lambda world: None,
    S.EARLY: lambda world: world.emit_early(5),
    S.DECODE: lambda world: world.emit(5),
    S.DECODE_ALONE: lambda world: (world.emit(5), world.give(InstanceLost(P, "killed", True))),
    S.RETRYING: lambda world: world.give(FAILS),
    S.FINISHED: lambda world: world.give(Finished(Finish(b"", "stop"))),
    S.FAILED: lambda world: world.give(OutOfTime()),
    S.CANCELLED: lambda world: world.give(ReaderGone(False)),
}
"""How to reach each state from PREFILL."""

INPUTS: dict[str, tuple[Callable[[World], Event], GenerationEvent | None]] = {
    "first_token": (lambda world: TokensBegan(), E.FIRST_TOKEN),
    "early_token": (lambda world: TokenCameEarly(), E.EARLY_TOKEN),
    "chosen": (lambda world: world.chosen(1, failure=Failure(TransferFailed("x"), frozenset())), E.CHOSEN),
    "no_pair": (lambda world: NoPair(Failure(TransferFailed("x"), frozenset())), E.NO_PAIR),
    "finished": (lambda world: Finished(Finish(b"", "length")), E.FINISH),
    "finished_in_error": (lambda world: Finished(Finish(b"", "error", "transfer_failed", "x")), E.FAIL),
    "failed": (lambda world: FAILS, E.FAIL),
    "not_delivered": (lambda world: NotDelivered(RequestLost("x"), D), E.STALL),
    "decode_lost": (lambda world: InstanceLost(D, "left", False), E.FAIL),
    "prefill_left": (lambda world: InstanceLost(P, "left", False), E.PREFILL_LOST),
    "stranger_lost": (lambda world: InstanceLost(STRANGER, "killed", True), None),
    "silent": (lambda world: Silent(), E.SILENCE),
    "out_of_time": (lambda world: OutOfTime(), E.GIVE_UP),
    "process_ends": (lambda world: GivenUp(NoInstance("x")), E.GIVE_UP),
    "client_gone": (lambda world: ReaderGone(False), E.CANCEL),
    "client_has_all": (lambda world: ReaderGone(True), E.FINISH),
}


def in_state(state: GenerationState, **config: Any) -> World:
    world = World(**config)
    if state is not S.ASKED:
        world.give(world.chosen())
        ROAD[state](world)
    assert world.state is state
    return world


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("state", S, ids=lambda state: state.name)
def test_every_event_in_every_state_is_a_pair_of_the_table_or_absorbed(state: GenerationState, name: str) -> None:
    world = in_state(state)
    begun, ended, before = world.begun(), world.ended(), len(world.effects)
    make, event = INPUTS[name]
    target = GENERATION_TRANSITIONS.get((state, event)) if event is not None else None
    world.give(make(world))
    kinds = {type(effect) for effect in world.effects[before:]}
    if target is None:
        assert (world.state, kinds) == (state, set())
        return
    assert world.state is target
    asks = event in (E.FAIL, E.STALL, E.PREFILL_LOST, E.SILENCE)
    assert (Choose in kinds) is asks
    assert world.begun() == begun + ([len(begun) + 1] if event is E.CHOSEN else [])
    ends = {S.FINISHED: ["finished"], S.FAILED: ["failed"], S.CANCELLED: ["cancelled"]}.get(target, [])
    assert world.ended() == ended + (["retried"] if event is E.CHOSEN and begun else ends)
    is_ds_word = name == "finished"
    assert (Cancel in kinds) is (Ended in kinds and not is_ds_word)
    assert (CountServed in kinds) is (target is S.FINISHED)
    assert (CountStarted in kinds) is (state is S.PREFILL and event in (E.EARLY_TOKEN, E.FIRST_TOKEN))
    assert (Blame in kinds) is (event in (E.FAIL, E.STALL))
    assert world.in_hand() == (0 if target in OVER else 1)
    assert (world.generation.attempt is None) is (target in OVER)
    assert (world.generation.error is not None) is (target in (S.FAILED, S.CANCELLED) or name == "client_has_all")


def test_every_pair_of_the_table_is_one_that_an_event_brings() -> None:
    brought = {event for _, event in INPUTS.values()} | {E.PREFILL_DIED}
    assert {event for _, event in GENERATION_TRANSITIONS} == brought - {None} == set(E)
    assert set(ROAD) == set(S) - {S.ASKED}


def test_a_request_ends_once_and_one_whose_attempt_failed_gets_a_pair_or_ends() -> None:
    assert not [source for source, _ in GENERATION_TRANSITIONS if source in OVER]
    after = {target for (source, _), target in GENERATION_TRANSITIONS.items() if source is S.RETRYING}
    assert after == {S.PREFILL, *OVER}
    waits_for_d = {source for source, event in GENERATION_TRANSITIONS if event in (E.STALL, E.PREFILL_LOST)}
    assert waits_for_d == {S.PREFILL, S.EARLY}
    for state in (*RUNNING, S.RETRYING):  # the clock and the client may end a request at any time
        assert GENERATION_TRANSITIONS[state, E.GIVE_UP] is S.FAILED
        assert GENERATION_TRANSITIONS[state, E.CANCEL] is S.CANCELLED


def test_a_pair_that_it_did_not_ask_for_is_none() -> None:
    world = in_state(S.DECODE)
    assert world.give(world.chosen(1, failure=None)) == [] and world.begun() == [1]


def test_an_end_that_nobody_asked_for_is_ds_own_fault() -> None:
    world = in_state(S.DECODE)
    blame, *_ = world.give(Finished(Finish(b"", "cancelled")))
    assert isinstance(blame, Blame) and blame.failure.suspects == {D}
    assert world.generation.error is not None and world.generation.error.code == "internal"


@pytest.mark.parametrize("by", ["prefill_left", "silent"])
def test_an_attempt_that_is_doubted_stays_where_no_other_pair_is(by: str) -> None:
    world = in_state(S.PREFILL)
    world.give(INPUTS[by][0](world))
    assert world.state is S.PREFILL and world.give(world.no_pair()) == []
    world.emit(5)
    assert world.state is S.DECODE and world.begun() == [1]


def test_an_attempt_that_failed_ends_its_request_where_no_other_pair_is() -> None:
    world = in_state(S.RETRYING)
    world.give(world.no_pair())
    assert world.state is S.FAILED and world.ended() == ["failed"]
    assert world.generation.error is FAILS.error


def test_a_pair_that_is_the_one_in_doubt_or_cut_off_like_it_is_no_pair() -> None:
    world = in_state(S.PREFILL)
    world.give(Silent())
    assert world.give(world.chosen(1, is_cut_off=True)) == [] and world.begun() == [1]
    world.give(AttemptFailed(NoInstance("its queue is full"), D))
    world.give(world.chosen(0))  # the instance that did not read, as no other is there: it is not asked again at once
    assert world.state is S.FAILED and world.begun() == [1]
    broken = in_state(S.RETRYING)
    broken.give(broken.chosen(0, is_cut_off=True))  # a broken link is tried again if there is no other pair
    assert broken.state is S.PREFILL and broken.begun() == [1, 2]


def test_the_next_attempt_goes_on_behind_what_was_received() -> None:
    world = in_state(S.PREFILL)
    world.emit(5, 6)
    world.generation.take()
    world.emit(7)
    world.give(FAILS)
    asked = world.effects[-1]
    assert isinstance(asked, Choose) and asked.token_ids == pack_i32([1, 2, 3, 5, 6, 7])
    assert asked.avoid == {P, D}
    effects = world.give(world.chosen(1))
    assert [type(effect) for effect in effects] == [Cancel, Ended, Begin]
    attempt = world.generation.attempt
    assert attempt is not None and (attempt.num_continued, attempt.number) == (3, 2)
    assert attempt.token_ids == asked.token_ids and world.generation.record.failed == 1


def test_only_the_first_token_of_the_request_is_its_first() -> None:
    world = in_state(S.DECODE)
    world.now_s += 5.0
    world.give(FAILS)
    world.give(world.chosen(1))
    world.emit(6)
    started = [effect.is_first for effect in world.effects if isinstance(effect, CountStarted)]
    assert started == [True, False]
    assert world.generation.first_token_s == NOW_S
    assert world.generation.attempt is not None and world.generation.attempt.first_token_s == NOW_S + 5.0


@pytest.mark.parametrize(("tokens", "reason"), [((5, 9), "stop"), ((5, 6, 7, 8), "length"), ((5, 6, 7), "")])
@pytest.mark.parametrize("by", ["failed", "decode_lost"])
def test_a_request_of_which_every_token_came_is_finished_by_a_failure(
    by: str, tokens: tuple[int, ...], reason: str
) -> None:
    world = in_state(S.PREFILL)
    world.emit(*tokens)
    world.give(INPUTS[by][0](world))
    assert world.state is (S.FINISHED if reason else S.RETRYING)
    assert world.generation.finish == (Finish(world.generation.finish.room, reason) if reason else None)  # type: ignore[union-attr]


def test_silence_moves_nothing_of_which_two_tokens_came() -> None:
    world = in_state(S.DECODE)
    world.generation.tokens.append(6)
    assert world.give(Silent()) == []


@pytest.mark.parametrize(
    ("event", "config", "now_s"),
    [
        (AttemptFailed(InvalidRequest("x", "prompt"), D), {}, NOW_S),
        (FAILS, {"retry": RetryConfig(max_attempts=1)}, NOW_S),
        (FAILS, {}, END_S),
    ],
)
def test_what_no_other_pair_can_cure_ends_the_request_at_once(
    event: Event, config: dict[str, Any], now_s: float
) -> None:
    world = in_state(S.PREFILL, **config)
    world.now_s = now_s
    kinds = [type(effect) for effect in world.give(event)]
    assert world.state is S.FAILED and Choose not in kinds


def test_deaths_end_a_request_and_only_deaths_do() -> None:
    for has_died in (True, False):
        world = in_state(S.PREFILL, retry=RetryConfig(max_attempts=99))
        for number in range(MAX_DEATHS):
            assert world.state is S.PREFILL
            world.give(InstanceLost(instance_key(PAIRS[number].decode), "killed", has_died))
            if number + 1 < MAX_DEATHS or not has_died:
                world.give(world.chosen(number + 1))
        assert world.state is (S.FAILED if has_died else S.PREFILL)
        assert world.generation.record.deaths == (MAX_DEATHS if has_died else 0)


@pytest.mark.parametrize(
    ("state", "event", "dead"),
    [
        (S.PREFILL, AttemptFailed(PrefillLost("x"), D, is_peer_here=True), P),
        (S.PREFILL, AttemptFailed(PrefillLost("x"), D), None),
        (S.DECODE_ALONE, AttemptFailed(PrefillLost("x"), D), P),
        (S.DECODE_ALONE, Finished(Finish(b"", "error", "prefill_lost", "x")), P),
        (S.DECODE, Finished(Finish(b"", "error", "prefill_lost", "x"), is_prefill_here=True), P),
        (S.DECODE, Finished(Finish(b"", "error", "prefill_lost", "x")), None),
        (S.PREFILL, AttemptFailed(PrefillLost("x"), P, is_peer_here=True), None),
        (S.PREFILL, AttemptFailed(DecodeLost("x"), P, is_peer_here=True), D),
        (S.PREFILL, AttemptFailed(DecodeLost("x"), P), None),
        (S.PREFILL, AttemptFailed(DecodeLost("x"), D, is_peer_here=True), None),
    ],
)
def test_whose_death_the_other_half_of_a_pair_reports(
    state: GenerationState, event: Event, dead: InstanceKey | None
) -> None:
    world = in_state(state)
    world.give(event)
    asked = world.effects[-1]
    assert isinstance(asked, Choose) and asked.failure.dead == dead


def test_of_a_group_the_first_stands_for_all_where_instances_are_blamed() -> None:
    group = PromptGroup(b"g" * 16)
    worlds = [World(), World()]
    for world in worlds:
        world.give(world.chosen(group=group))
    assert [attempt.is_group_leader for attempt in group.attempts] == [True, False]
    blames = [any(isinstance(effect, Blame) for effect in world.give(FAILS)) for world in worlds]
    assert blames == [True, False]


def test_the_end_has_the_stages_and_whether_the_reader_knows() -> None:
    stages = StageTimes(admission_s=1.0, total_s=2.0)
    world = in_state(S.DECODE)
    served, ended = world.give(Finished(Finish(b"", "stop", stages=stages)))
    assert isinstance(served, CountServed)
    assert isinstance(ended, Ended) and ended.is_news
    assert ended.record.stages is not None and ended.record.stages.is_reported
    for is_complete in (True, False):
        world = in_state(S.DECODE)
        *_, ended = world.give(ReaderGone(is_complete))
        assert isinstance(ended, Ended) and not ended.is_news


def test_drafts_of_all_attempts_add_up_and_each_record_has_its_own() -> None:
    world = in_state(S.DECODE)
    generation = world.generation
    world.give(Finished(Finish(b"", "error", "transfer_failed", "x", drafts=FAILED_DRAFTS)))
    world.give(world.chosen(1))
    world.emit(6)
    assert generation.drafts == FAILED_DRAFTS
    world.give(Finished(Finish(b"", "length", drafts=DRAFTS)))
    assert generation.drafts == (("prediction", 4, 3), ("text", 7, 5))
    assert [record.drafts for record in generation.ended] == [FAILED_DRAFTS, DRAFTS]
