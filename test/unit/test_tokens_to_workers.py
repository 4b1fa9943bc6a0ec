"""`router.workers` on the instances' side: tokens go to the API process that asked; its requests die with it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import INFO, DSide, Instance, PSide, Wire, prompt_of, room_of
from support.executors import expected_tokens

from chitu.instance.token_manager import TokenManager
from chitu.protocol import DecodeRequest, Finish, PrefillRequest, SamplingParams, UnifiedRequest, pack_i32, token_codec

PROMPT = prompt_of(1, 10)
SAMPLING = SamplingParams(12, temperature=0.0)
PORT_OF = {71: 5001, 72: 5002, 73: 5003}
"""Token ports of API processes, by incarnation."""


class Ports:
    """Token ports that record what they receive, as (port, rooms, tokens, ended rooms)."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[bytes], list[int], list[bytes]]] = []
        self.closed: list[int] = []

    def open(self, port: int) -> _Port:
        return _Port(self, port)

    def take(self, port: int, frame: bytes) -> bool:
        batch = token_codec.decode(frame)
        self.batches.append((port, batch.rooms, batch.tokens, [finish.room for finish in batch.finished]))
        return True


class _Port:
    def __init__(self, ports: Ports, number: int) -> None:
        self._ports, self._number = ports, number

    def send(self, frame: bytes) -> bool:
        return self._ports.take(self._number, frame)

    def close(self) -> None:
        self._ports.closed.append(self._number)


def manager(ports: Ports) -> TokenManager:
    return TokenManager(9, lambda frame: ports.take(0, frame), open_port=ports.open)


pushes = st.lists(st.tuples(st.sampled_from([0, *PORT_OF]), st.integers(0, 1000)), max_size=40)


@given(st.lists(pushes, max_size=5))
def test_each_process_gets_one_message_a_step_with_its_own_tokens_in_order(steps: list[list[tuple[int, int]]]) -> None:
    ports = Ports()
    tokens = manager(ports)
    for worker, port in PORT_OF.items():
        tokens.expect(worker, port)
    for step in steps:
        ports.batches.clear()
        for worker, token in step:
            tokens.push(room_of(worker), token, worker)
        tokens.flush()
        wanted = {worker: [token for to, token in step if to == worker] for worker in dict(step)}
        got = {port: (set(rooms), sent) for port, rooms, sent, _ in ports.batches}
        assert len(got) == len(ports.batches), "two messages of one step to one process"
        assert got == {PORT_OF.get(w, 0): ({room_of(w)}, sent) for w, sent in wanted.items()}
    assert tokens.tokens_sent == sum(map(len, steps))


def test_what_a_dead_process_was_not_sent_yet_is_dropped_and_its_port_closed() -> None:
    ports = Ports()
    tokens = manager(ports)
    for worker in (71, 72):
        tokens.expect(worker, PORT_OF[worker])
        tokens.push(room_of(worker), 5, worker)
        tokens.finish(Finish(room_of(worker), "length"), worker)
    tokens.forget(71)
    tokens.push(room_of(71), 6, 71)
    tokens.finish(Finish(room_of(71), "length"), 71)
    tokens.flush()
    assert ports.batches == [(5002, [room_of(72)], [5], [room_of(72)])]
    assert ports.closed == [5001]
    tokens.forget(0)
    tokens.push(room_of(1), 7)
    tokens.flush()
    assert ports.batches[-1][0] == 0, "the router's own port stays"


def test_a_dead_process_takes_its_rooms_with_it_and_nobody_elses() -> None:
    wire = Wire()
    prefill = wire.prefill = Instance(60, sender=PSide(wire))
    decode = wire.decode = Instance(60, receiver=DSide(wire))
    for worker, port in PORT_OF.items():
        room = room_of(worker)
        decode.scheduler.submit(
            DecodeRequest(room, "r", pack_i32(PROMPT), SAMPLING, 0, 1, router_worker=worker, reply_port=port)
        )
        prefill.scheduler.submit(PrefillRequest(room, "r", pack_i32(PROMPT), 0, 1, router_worker=worker))
    for instance in (decode, prefill):
        instance.scheduler.step()
        instance.scheduler.cancel_worker(72)
        late = room_of(172)
        decode.scheduler.submit(
            DecodeRequest(late, "late", pack_i32(PROMPT), SAMPLING, 0, 1, router_worker=72, reply_port=5002)
        )
    instances = (prefill, decode)
    for instance in instances:
        instance.scheduler.step()
        load = instance.scheduler.load
        assert load.waiting + load.transferring + load.running == 2, "the dead one's room is over at once"
    rng = random.Random(1)
    for _ in range(300):
        for instance in instances:
            instance.scheduler.step()
        wire.deliver(rng)
        if all(instance.scheduler.is_idle for instance in instances):
            break
    tokens = expected_tokens(PROMPT, 12, INFO.vocab_size, SAMPLING)
    assert {room: decode.tokens[room] for room in decode.tokens} == {room_of(71): tokens, room_of(73): tokens}
    assert decode.ports == {5001: [room_of(71)] * 12, 5003: [room_of(73)] * 12}
    assert decode.open_ports == [5001, 5003]
    assert not prefill.failures and not decode.failures
    for instance in instances:
        instance.check_empty()


def test_a_request_without_a_way_back_is_refused_through_the_stats_port_and_the_next_one_served() -> None:
    instance = Instance(60)
    for number, port in ((1, 0), (2, 70000), (3, 5001)):
        instance.scheduler.submit(
            UnifiedRequest(room_of(number), "r", pack_i32(PROMPT), SAMPLING, router_worker=70 + number, reply_port=port)
        )
    instance.run()
    assert {room: error.code for room, error in instance.failures.items()} == {
        room_of(1): "bad_frame",
        room_of(2): "bad_frame",
    }
    assert instance.tokens == {room_of(3): expected_tokens(PROMPT, 12, INFO.vocab_size, SAMPLING)}
    instance.check_empty()
