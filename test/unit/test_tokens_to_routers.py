"""Several routers on the instances' side: tokens go to the one that asked; with it end its requests, and no others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, prompt_of, room_of
from support.requests import decode_request, prefill_request, unified_request

from chitu.fake.executor import expected_tokens
from chitu.instance.token_manager import TokenManager
from chitu.protocol import Finish, SamplingParams, pack_i32, token_codec
from chitu.protocol.weights import WeightsOrder

PROMPT = prompt_of(1, 10)
SAMPLING = SamplingParams(12, temperature=0.0)
NUM_ROUTERS = 3


class Ports:
    """Token ports that record what they receive, as (router, rooms, tokens, ended rooms)."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[bytes], list[int], list[bytes]]] = []
        self.tokens = TokenManager(9, *(lambda frame, to=to: self._take(to, frame) for to in range(NUM_ROUTERS)))

    def _take(self, router: int, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        self.batches.append((router, batch.rooms, batch.tokens, [finish.room for finish in batch.finished]))
        return True


pushes = st.lists(st.tuples(st.integers(0, NUM_ROUTERS - 1), st.integers(0, 1000)), max_size=40)


@given(st.lists(pushes, max_size=5))
def test_each_router_gets_one_message_a_step_with_its_own_tokens_in_order(steps: list[list[tuple[int, int]]]) -> None:
    ports = Ports()
    for step in steps:
        ports.batches.clear()
        for router, token in step:
            ports.tokens.push(room_of(router), token, router)
        ports.tokens.flush()
        wanted = {router: [token for to, token in step if to == router] for router in dict(step)}
        got = {router: (set(rooms), sent) for router, rooms, sent, _ in ports.batches}
        assert len(got) == len(ports.batches), "two messages of one step to one router"
        assert got == {router: ({room_of(router)}, sent) for router, sent in wanted.items()}
    assert ports.tokens.tokens_sent == sum(map(len, steps))


def test_what_a_router_that_was_replaced_was_not_sent_yet_is_dropped_and_nothing_of_the_others() -> None:
    ports = Ports()
    for router in (1, 2):
        ports.tokens.push(room_of(router), 5, router)
        ports.tokens.finish(Finish(room_of(router), "length"), router)
    ports.tokens.restart(1)
    ports.tokens.flush()
    assert ports.batches == [(2, [room_of(2)], [5], [room_of(2)])]
    assert not ports.tokens.expect(NUM_ROUTERS, 8) and not ports.tokens.expect(-1, 8), "there is no such router"
    ports.tokens.push(room_of(1), 6, 1)
    ports.tokens.flush()
    assert ports.batches[-1] == (1, [room_of(1)], [6], [])


@pytest.mark.parametrize("ending", ["cancel_all", "end_all"])
def test_a_router_that_is_gone_takes_its_rooms_with_it_and_nobody_elses(ending: str) -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(60, sender=PSide(wire))
    decode = wire.decode = Instance(60, receiver=DSide(wire))
    for router in (0, 1):
        room = room_of(router)
        decode.scheduler.submit(decode_request(room, "r", pack_i32(PROMPT), SAMPLING, 0, 1, router=router))
        prefill.scheduler.submit(prefill_request(room, "r", pack_i32(PROMPT), 0, 1, router=router))
    instances = (prefill, decode)
    for instance in (decode, prefill):
        instance.scheduler.step()
        if ending == "cancel_all":
            instance.scheduler.cancel_all(0)
        else:
            instance.scheduler.end_all(30.0, 0)
    for instance in instances:
        instance.scheduler.step()
        load = instance.scheduler.load
        assert load.waiting + load.transferring + load.running == 1, "the room of the one that is gone is over at once"
    rng = random.Random(1)
    for _ in range(300):
        for instance in instances:
            instance.scheduler.step()
        wire.deliver(rng)
        if all(instance.scheduler.is_idle for instance in instances):
            break
    assert decode.tokens == {room_of(1): expected_tokens(PROMPT, 12, INFO.vocab_size, SAMPLING)}
    assert decode.rooms_of_second[:12] == [room_of(1)] * 12
    assert bool(prefill.failures) is (ending == "end_all") and not decode.failures
    for instance in instances:
        instance.check_empty()


def test_a_request_of_a_router_that_is_not_on_the_list_is_ignored_and_the_next_one_served() -> None:
    instance = Instance(60)
    for number, router in ((1, 7), (2, -1), (3, 1)):
        instance.scheduler.submit(unified_request(room_of(number), "r", pack_i32(PROMPT), SAMPLING, router=router))
    instance.run()
    assert not instance.failures
    assert instance.tokens == {room_of(3): expected_tokens(PROMPT, 12, INFO.vocab_size, SAMPLING)}
    instance.check_empty()


def test_an_instance_reports_that_it_is_drained_once_no_request_of_any_router_runs() -> None:
    instance = Instance(60)
    weights = instance.scheduler.weights
    for number in (0, 1):
        room = room_of(number)
        instance.scheduler.submit(unified_request(room, "r", pack_i32(PROMPT), SAMPLING, router=number))
    instance.scheduler.step()
    weights.set_order(WeightsOrder(holds=True))
    reported = []
    for _ in range(2 * SAMPLING.max_tokens):
        instance.scheduler.step()
        assert weights.report.holds and weights.report.is_drained is instance.scheduler.is_done
        reported.append(weights.report.is_drained)
    assert reported == sorted(reported) and {*reported} == {False, True}, reported
    weights.set_order(WeightsOrder())
    instance.scheduler.step()
    assert not weights.report.holds and not weights.report.is_drained
