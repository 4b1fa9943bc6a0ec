"""What the router does with attempts that fail: another pair, a continuation, or the error; and never a token twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
from router_world import LAYOUT, ONE_TRY, Client, RecordingOutbox, World, pair, two_pairs
from support.clock import FakeClock

from chitu.config.schema import BreakerConfig, RetryConfig, RouterConfig
from chitu.errors import NoInstance
from chitu.net.http import error_headers
from chitu.protocol import Finish, InstanceInfo, SamplingParams, TokenBatch, pack_i32
from chitu.router.attempts import TimerWheel
from chitu.router.candidates import InstanceKey
from chitu.router.dispatch import TOKEN_GROUP
from chitu.router.members import ClusterMember, Members
from chitu.types import Role

FAILURES = {
    # code: instances that must not get the next attempt, if D of the pair P0-D0 reports it, and if P does
    "transfer_failed": ({"P0", "D0"}, {"P0", "D0"}),
    "transfer_timeout": ({"P0", "D0"}, {"P0", "D0"}),
    "transfer_stalled": ({"P0", "D0"}, {"P0", "D0"}),
    "integrity": ({"P0", "D0"}, {"P0", "D0"}),
    "prefill_lost": ({"P0"}, {"P0"}),
    "decode_lost": ({"D0"}, {"D0"}),
    "bootstrap_timeout": ({"P0"}, {"D0"}),
    "capacity": ({"D0"}, {"P0"}),
    "queue_timeout": ({"D0"}, {"P0"}),
}
FINAL = (
    "invalid_request",
    "context_length_exceeded",
    "cancelled",
    "internal",
    "incompatible_layout",
    "request_timeout",
)


@pytest.mark.parametrize("code", FAILURES)
@pytest.mark.parametrize("reporter", ["D0", "P0"])
def test_a_failure_before_the_first_token_moves_to_others_with_a_new_room(code: str, reporter: str) -> None:
    world = two_pairs()
    client = world.add_client()
    assert world.pair(client.generation) == "P0-D0"
    old = world.room(client.generation)
    if reporter == "D0":
        world.decode_fails(old, code)
    else:
        world.fails("P0", old, code)
    new = world.room(client.generation)
    assert new != old
    suspects = FAILURES[code][reporter == "P0"]
    assert not suspects & set(world.pair(client.generation).split("-"))
    assert client.generation is not None
    assert {f"{key.role.letter}{key.engine_rank}" for key in client.generation.record.avoid} == suspects
    assert sorted(world.cancelled()) == ["D0", "P0"], "the old pair is told that it is over"
    world.emit(old, 90, 91)
    world.decode_fails(old, "capacity")
    world.emit(new, 5, 6, finish="length")
    assert client.tokens == [5, 6] and client.generation is not None and client.generation.error is None
    counters = world.router.counters
    assert (counters.retries, counters.requests, counters.attempts, counters.failed) == ({code: 1}, 1, 2, {})
    assert counters.stale_tokens == 2 and world.router.in_flight == 0
    first, last = world.router.journal.ended
    assert (first.state, first.error, first.attempt) == ("retried", code, 1)
    assert (last.state, last.error, last.attempt, last.request_id) == ("finished", "", 2, first.request_id)


@pytest.mark.parametrize("code", FINAL)
def test_what_fails_everywhere_is_not_tried_again(code: str) -> None:
    world = two_pairs()
    client = world.add_client()
    world.decode_fails(world.room(client.generation), code)
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == code
    assert world.router.counters.retries == {} and world.router.counters.failed == {code: 1}


@pytest.mark.parametrize("code", FAILURES)
def test_after_the_first_token_the_next_d_goes_on_behind_the_last_one(code: str) -> None:
    world = two_pairs()
    client = world.add_client()
    old = world.room(client.generation)
    world.emit(old, 11, 12)
    world.router.on_tokens(TokenBatch(1, [old], [13], []))  # received, and not yet read by the client
    world.decode_fails(old, code)
    new = world.room(client.generation)
    decode, prefill = (world.sent_to(new)[name] for name in sorted(world.sent_to(new)))
    expected = pack_i32([1, 2, 3, 11, 12, 13])
    assert (decode.head.token_ids, decode.head.num_emitted, prefill.head) == (expected, 3, decode.head)
    assert decode.sampling == client.generation.request.sampling  # type: ignore[union-attr]
    world.emit(old, 14)  # late: D emits it again
    world.emit(new, 14, 15, finish="length")
    assert client.tokens == [11, 12, 13, 14, 15]
    counters = world.router.counters
    assert (counters.continuations, counters.recomputed_tokens, counters.stale_tokens) == (1, 6, 1)
    ended = world.router.journal.ended[-1]
    assert (ended.prompt_tokens, ended.output_tokens, ended.continued_tokens) == (3, 5, 3)


def test_a_continuation_has_the_logprobs_of_its_own_tokens_alone() -> None:
    world = two_pairs()
    client = world.add_client(sampling=SamplingParams(8, logprobs=0))
    generation = client.generation
    assert generation is not None
    old = world.room(generation)
    world.router.on_tokens(TokenBatch(1, [old, old], [11, 12], [], logprobs=[(0, b"a"), (1, b"b")]))
    world.decode_fails(old, "transfer_failed")
    new = world.room(generation)
    # Late, and of two rooms in one message: a token of an ended attempt is dropped with its logprobs.
    world.router.on_tokens(TokenBatch(1, [old, new, old], [12, 13, 13], [], logprobs=[(0, b"x"), (1, b"c"), (2, b"y")]))
    world.router.on_tokens(TokenBatch(1, [new], [99], [], logprobs=[(1, b"z")]))  # a logprob of no token: all dropped
    world.emit(new, finish="length")
    assert client.tokens == [11, 12, 13]
    assert generation.take_logprobs() == [b"a", b"b", b"c"] and generation.take_logprobs() == []


def test_every_half_of_every_attempt_has_the_priority() -> None:
    world = two_pairs()
    client = world.add_client(priority=-3)
    rooms = [world.room(client.generation)]
    world.decode_fails(rooms[0], "transfer_failed")
    rooms.append(world.room(client.generation))
    world.emit(rooms[1], 5)
    world.decode_fails(rooms[1], "transfer_failed")
    rooms.append(world.room(client.generation))
    assert len(set(rooms)) == 3
    for room in rooms:
        assert [half.head.options.priority for half in world.sent_to(room).values()] == [-3, -3]


def test_the_d_of_every_attempt_has_the_prediction() -> None:
    world, prediction = two_pairs(), pack_i32([5, 6, 7])
    client = world.add_client(prediction=prediction)
    for token in (5, 6, 9):
        halves = world.sent_to(world.room(client.generation)).values()
        assert [half.prediction for half in halves if hasattr(half, "sampling")] == [prediction]
        world.emit(world.room(client.generation), token)
        world.decode_fails(world.room(client.generation), "transfer_failed")


def test_a_continuation_is_continued() -> None:
    world = two_pairs()
    client = world.add_client()
    for token in (11, 12):
        world.emit(world.room(client.generation), token)
        world.decode_fails(world.room(client.generation), "transfer_failed")
    (decode,) = (m for m in world.sent_to(world.room(client.generation)).values() if hasattr(m, "sampling"))
    assert (decode.head.token_ids, decode.head.num_emitted) == (pack_i32([1, 2, 3, 11, 12]), 2)
    world.emit(world.room(client.generation), 13, finish="stop")
    assert client.tokens == [11, 12, 13]


def test_a_reader_that_waits_for_the_end_gets_every_token_once() -> None:
    world = two_pairs()
    client = world.add_client(wake_per_token=False)
    world.emit(world.room(client.generation), 11, 12)
    world.lose(Role.DECODE)
    assert client.tokens == [] and world.router.running()[0].state == "prefill"
    world.emit(world.room(client.generation), 13)
    assert client.tokens == [] and world.router.running()[0].state == "decode"
    world.emit(world.room(client.generation), 14, finish="length")
    assert client.tokens == [11, 12, 13, 14]


def test_a_continuation_of_tokens_that_came_in_groups_begins_after_the_last_group() -> None:
    world = two_pairs()
    client = world.add_client(wake_per_token=False)
    room = world.room(client.generation)
    assert world.sent_to(room)["D0"].token_group == TOKEN_GROUP
    world.router.on_tokens(TokenBatch(1, [], [], [], groups=[(room, [11])]))
    world.router.on_tokens(TokenBatch(1, [], [], [], groups=[(room, [12, 13]), (bytes(16), [5])]))
    assert world.router.running()[0].state == "decode" and world.router.counters.stale_tokens == 1
    world.lose(Role.DECODE)
    again = world.room(client.generation)
    half = world.sent_to(again)["D1"]
    found = half.head.token_ids, half.head.num_emitted, half.token_group
    assert found == (pack_i32([1, 2, 3, 11, 12, 13]), 3, TOKEN_GROUP)
    world.router.on_tokens(
        TokenBatch(2, [], [], [Finish(again, "length")], groups=[(room, [14]), (again, [14, 15])]),
    )
    world.router.flush()
    assert client.tokens == [11, 12, 13, 14, 15] and world.router.counters.tokens == 7


@pytest.mark.parametrize("fields", [{}, {"trace": "records"}, {"sampling": SamplingParams(max_tokens=2, logprobs=0)}])
def test_tokens_that_are_read_singly_come_singly(fields: dict[str, Any]) -> None:
    world = two_pairs()
    client = world.add_client(wake_per_token=not fields, **fields)
    assert world.sent_to(world.room(client.generation))["D0"].token_group == 1


def test_a_unified_instance_continues_too() -> None:
    world = World(Role.UNIFIED, Role.UNIFIED)
    client = world.add_client()
    world.emit(world.room(client.generation), 11)
    world.lose(Role.UNIFIED, 0)
    assert world.pair(client.generation) == "U1"
    whole = world.sent_to(world.room(client.generation))["U1"]
    assert (whole.head.token_ids, whole.head.num_emitted) == (pack_i32([1, 2, 3, 11]), 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sampling": SamplingParams(max_tokens=2)}, "length"),
        ({"stop_ids": frozenset({12})}, "stop"),
    ],
)
def test_a_request_whose_last_token_came_is_finished_and_not_continued(fields: dict[str, Any], reason: str) -> None:
    world = two_pairs(retry=ONE_TRY)
    client = world.add_client(**fields)
    world.emit(world.room(client.generation), 11, 12)
    world.lose(Role.DECODE)
    assert client.generation is not None and client.generation.finish is not None
    assert (client.generation.finish.reason, client.tokens) == (reason, [11, 12])
    assert world.router.counters.attempts == 1 and world.router.counters.finished == {reason: 1}


def test_streams_are_not_continued_where_the_configuration_says_so() -> None:
    world = two_pairs(retry=RetryConfig(continue_streams=False))
    waiting, streaming = world.add_client(), world.add_client()
    world.emit(world.room(streaming.generation), 11)
    for client in (waiting, streaming):
        world.decode_fails(world.room(client.generation), "prefill_lost")
    assert waiting.generation is not None and waiting.generation.error is None
    assert streaming.generation is not None and streaming.generation.error is not None


def test_attempts_are_bounded_and_the_last_error_reaches_the_client() -> None:
    world = two_pairs()
    client = world.add_client()
    rooms = []
    for code in ("transfer_failed", "bootstrap_timeout", "prefill_lost"):
        rooms.append(world.room(client.generation))
        world.decode_fails(rooms[-1], code)
    assert len(set(rooms)) == 3
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == "prefill_lost" and world.router.in_flight == 0
    assert [record.state for record in world.router.journal.ended] == ["retried", "retried", "failed"]


def test_one_attempt_means_none_more() -> None:
    world = two_pairs(retry=ONE_TRY)
    client = world.add_client()
    world.lose(Role.DECODE)
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == "decode_lost"


def test_the_same_pair_is_tried_again_where_it_is_the_only_one_but_not_when_it_has_too_much_to_do() -> None:
    world = pair()
    broken, busy = world.add_client(), world.add_client()
    world.decode_fails(world.room(broken.generation), "transfer_failed")
    assert world.pair(broken.generation) == "P0-D0"
    world.decode_fails(world.room(busy.generation), "capacity")
    assert busy.generation is not None and busy.generation.error is not None
    assert busy.generation.error.code == "capacity"


def test_all_that_failed_a_request_are_left_out_until_nobody_else_is_there() -> None:
    world = World(Role.PREFILL, *[Role.DECODE] * 3, retry=RetryConfig(max_attempts=9))
    client = world.add_client()
    seen = [world.pair(client.generation)]
    for _ in range(2):
        world.decode_fails(world.room(client.generation), "decode_lost")
        seen.append(world.pair(client.generation))
    assert set(seen) == {"P0-D0", "P0-D1", "P0-D2"}
    world.decode_fails(world.room(client.generation), "decode_lost")
    assert world.pair(client.generation) in seen


def test_who_failed_a_request_once_comes_before_who_fails_all_of_them() -> None:
    world = World(Role.PREFILL, Role.DECODE, Role.DECODE, breaker=BreakerConfig(failures=2), retry=RetryConfig())
    for client in [world.add_client() for _ in range(4)]:
        if world.pair(client.generation) == "P0-D1":
            world.decode_fails(world.room(client.generation), "decode_lost")
        serve(world, client)
    assert world.router.metrics().breakers["D1"] == {"open": 1}
    client = world.add_client()
    world.decode_fails(world.room(client.generation), "decode_lost")
    assert world.pair(client.generation) == "P0-D0"


def test_nobody_left_is_told_by_the_error_that_caused_it() -> None:
    world = pair()
    client = world.add_client()
    world.lose(Role.DECODE)
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == "decode_lost"


def test_a_lost_p_moves_what_has_no_token_yet_and_leaves_the_rest_to_d() -> None:
    world = two_pairs()
    waiting, streaming = world.add_client(), world.add_client()
    assert [world.pair(c.generation) for c in (waiting, streaming)] == ["P0-D0", "P1-D1"]
    other = world.add_client()  # P0-D1
    world.emit(world.room(other.generation), 11)
    room = world.room(other.generation)
    world.lose(Role.PREFILL, 0)
    assert world.pair(waiting.generation).startswith("P1")
    assert world.room(other.generation) == room, "its KV may have landed: D says so if not"
    world.emit(room, 12, finish="length")
    assert other.tokens == [11, 12]


def test_without_anybody_to_prefill_d_has_the_last_word_on_a_lost_p() -> None:
    world = pair()
    client = world.add_client()
    room = world.room(client.generation)
    world.lose(Role.PREFILL)
    world.emit(room, 11, 12, finish="length")
    assert client.tokens == [11, 12]


def test_no_attempt_starts_and_none_lasts_beyond_the_deadline() -> None:
    world = two_pairs()
    client, patient = world.add_client(timeout_s=2.0), world.add_client(timeout_s=1000.0)
    world.clock.advance(2.2)
    room = world.room(client.generation)
    world.decode_fails(room, "transfer_timeout")
    assert client.generation is not None and client.generation.error is not None
    assert client.generation.error.code == "transfer_timeout", "too late to try again"
    world.clock.advance(57)
    world.router.tick()
    assert patient.generation is not None and patient.generation.error is None
    world.clock.advance(1)
    world.router.tick()
    assert patient.generation.error is not None and "router.request_timeout_s" in patient.generation.error.message


def test_the_clients_own_deadline_spans_all_attempts() -> None:
    world = two_pairs()
    client = world.add_client(timeout_s=3.0)
    world.clock.advance(2)
    world.decode_fails(world.room(client.generation), "transfer_timeout")
    world.clock.advance(0.9)
    world.router.tick()
    assert client.generation is not None and client.generation.error is None
    world.clock.advance(0.2)
    world.router.tick()
    error = client.generation.error
    assert error is not None and error.code == "request_timeout"
    where = "attempt 2 waited 1.1 s in PREFILL for the first token of P1-D1"
    assert error.message == f"not finished within 3 s (X-Request-Timeout): {where}"
    assert world.router.in_flight == 0


def test_a_client_that_leaves_after_a_retry_is_cancelled_at_the_new_pair() -> None:
    world = two_pairs()
    client = world.add_client()
    world.decode_fails(world.room(client.generation), "transfer_failed")
    before = len(world.cancelled())
    new = world.pair(client.generation)
    assert client.generation is not None
    world.router.cancel(client.generation)
    assert sorted(world.cancelled()[before:]) == sorted(new.split("-"))
    assert world.router.in_flight == 0 and world.router.counters.cancelled == 1
    world.clock.advance(100)
    world.router.tick()
    assert world.router.counters.failed == {}


def test_a_process_that_ends_tries_nothing_again() -> None:
    world = two_pairs()
    client = world.add_client()
    world.router.fail_all(NoInstance("the server is shutting down"))
    assert client.generation is not None and client.generation.error is not None
    assert world.router.counters.attempts == 1


def test_an_instance_that_does_not_read_is_passed_over() -> None:
    world = two_pairs()
    d0 = next(key for key in world.outbox.peers if key.role is Role.DECODE and key.engine_rank == 0)
    world.outbox.full.add(d0)
    clients = [world.add_client() for _ in range(3)]
    assert all(world.pair(client.generation).endswith("D1") for client in clients)
    alone = pair()
    alone.outbox.full |= alone.outbox.peers
    with pytest.raises(NoInstance, match="D0 accepts no requests"):
        alone.add_client()
    assert alone.router.in_flight == 0 and alone.router.counters.failed == {"no_instance": 1}


def test_loads_are_those_of_the_attempts_that_run() -> None:
    world = two_pairs(retry=RetryConfig(max_attempts=9))
    client = world.add_client()
    for _ in range(5):
        world.emit(world.room(client.generation), 11)
        world.decode_fails(world.room(client.generation), "transfer_failed")
    world.emit(world.room(client.generation), 12, finish="stop")
    assert {member.load.own.requests for member in world.router._members.by_link.values()} == {0}


# ------------------------------------------------------------------------------------------------------------ breakers


def serve(world: World, client: Client) -> None:
    world.emit(world.room(client.generation), 1, finish="stop")


def test_an_instance_that_keeps_failing_gets_nothing_then_a_probe_then_everything() -> None:
    world = World(Role.PREFILL, Role.DECODE, Role.DECODE, breaker=BreakerConfig(failures=2, open_s=5.0))

    def served_by() -> str:
        """Serve a client and return its first pair; D0 fails every request."""
        client = world.add_client()
        first = world.pair(client.generation)
        if first.endswith("D0"):
            world.decode_fails(world.room(client.generation), "internal")
        else:
            serve(world, client)
        return first

    pairs = [served_by() for _ in range(12)]
    assert pairs.count("P0-D0") == 2, "its breaker opened after the second"
    assert world.router.counters.breaker_openings == {"D0": 1}
    assert world.router.metrics().breakers["D0"] == {"open": 1}
    world.clock.advance(5.1)
    assert world.router.metrics().breakers["D0"] == {"half_open": 1}
    assert [served_by() for _ in range(6)].count("P0-D0") == 1, "one probe"
    world.clock.advance(5.1)
    assert "P0-D0" not in [served_by() for _ in range(6)], "it stays shut for twice as long"
    world.clock.advance(5.1)
    clients = [world.add_client() for _ in range(4)]
    probes = [client for client in clients if world.pair(client.generation) == "P0-D0"]
    assert len(probes) == 1
    for client in clients:
        serve(world, client)
    assert world.router.metrics().breakers["D0"] == {"closed": 1}
    pairs = [world.pair(world.add_client().generation) for _ in range(4)]
    assert pairs.count("P0-D0") == 2


@pytest.mark.parametrize("code", ["transfer_timeout", "transfer_stalled", "queue_timeout", "bootstrap_timeout"])
def test_who_asks_again_after_a_deadline_is_told_to_wait_as_long_as_the_last_attempt_took(code: str) -> None:
    world = two_pairs()
    client = world.add_client()
    assert client.generation is not None
    times_s = iter((30.0, 20.5, 9.5))
    while not client.generation.done:
        world.clock.advance(took_s := next(times_s))
        world.decode_fails(world.room(client.generation), code)
    assert client.generation.error is not None and client.generation.error.code == code
    assert error_headers(client.generation.error) == [(b"retry-after", b"%d" % math.ceil(took_s))]


def test_who_asks_again_after_a_fault_need_not_wait() -> None:
    world = two_pairs(retry=ONE_TRY)
    client = world.add_client()
    world.clock.advance(30.0)
    world.decode_fails(world.room(client.generation), "transfer_failed")
    assert client.generation is not None and client.generation.error is not None
    assert error_headers(client.generation.error) == [(b"retry-after", b"1")]


def test_an_open_breaker_keeps_no_cluster_from_serving() -> None:
    world = pair(breaker=BreakerConfig(failures=1), retry=ONE_TRY)
    world.decode_fails(world.room(world.add_client().generation), "transfer_failed")
    assert world.router.metrics().breakers == {"P0": {"open": 1}, "D0": {"open": 1}}
    client = world.add_client()
    serve(world, client)
    assert world.router.metrics().breakers == {"P0": {"closed": 1}, "D0": {"closed": 1}}


def test_too_much_to_do_slowness_and_clients_faults_open_no_breaker() -> None:
    world = two_pairs(breaker=BreakerConfig(failures=1), retry=ONE_TRY)
    for code in ("capacity", "queue_timeout", "transfer_stalled", "invalid_request", "cancelled", "request_timeout"):
        world.decode_fails(world.room(world.add_client().generation), code)
    assert world.router.counters.breaker_openings == {}


KEY = InstanceKey(Role.DECODE, 0, 1)


def one_member(breaker: BreakerConfig) -> tuple[Members, ClusterMember]:
    members = Members(RouterConfig(breaker=breaker), RecordingOutbox())
    members.add(InstanceInfo(*KEY, "127.0.0.1", 1, 2, LAYOUT, 512))
    return members, members[KEY]


def test_a_breaker_doubles_up_to_its_limit_and_failures_from_before_do_not_count() -> None:
    members, member = one_member(BreakerConfig(failures=1, open_s=5.0, max_open_s=12.0))
    now_s = 100.0
    assert members.on_failure(member, now_s) and not members.on_failure(member, now_s + 1)
    for span_s in (5.0, 10.0, 12.0, 12.0):
        assert members.blocked(now_s + span_s - 0.1) == {KEY} and member.breaker.state(now_s) == "open"
        now_s += span_s
        assert members.blocked(now_s) == frozenset()
        member.breaker.on_sent(now_s)
        assert members.blocked(now_s) == {KEY} and member.breaker.state(now_s) == "half_open"
        assert members.on_failure(member, now_s)


def test_a_probe_of_which_nothing_is_heard_is_followed_by_another() -> None:
    members, member = one_member(BreakerConfig(failures=1, open_s=5.0))
    members.on_failure(member, 0.0)
    member.breaker.on_sent(5.0)
    assert members.blocked(9.9) == {KEY} and not members.blocked(10.0)
    members.on_success(member)
    assert member.breaker.state(10.0) == "closed" and not members.blocked(0.0)


def test_a_success_between_failures_starts_the_count_anew() -> None:
    members, member = one_member(BreakerConfig(failures=3))
    for _ in range(5):
        assert not members.on_failure(member, 1.0) and not members.on_failure(member, 1.0)
        members.on_success(member)


def test_things_run_out_by_their_deadline_whatever_their_order() -> None:
    clock = FakeClock()
    wheel: TimerWheel[str] = TimerWheel(0.05, clock.monotonic())
    for name, span_s in (("late", 9.0), ("soon", 1.0), ("gone", 1.0)):
        wheel.add(name, clock.monotonic() + span_s)
    wheel.discard("gone", clock.monotonic() + 1.0)
    wheel.discard("never there", clock.monotonic() + 3.0)
    found: dict[str, float] = {}
    for _ in range(500):
        found |= {name: clock.monotonic() for name in wheel.expired(clock.monotonic())}
        clock.advance(0.02)
    start_s = clock.monotonic() - 500 * 0.02
    assert {name: round(at_s - start_s, 1) for name, at_s in found.items()} == {"soon": 1.0, "late": 9.0}


def test_the_cached_tokens_of_an_answer_are_those_of_its_last_attempt() -> None:
    """An instance reports them only if there are any."""
    world = two_pairs()
    client = world.add_client()
    assert client.generation is not None
    first = world.room(client.generation)
    world.router.on_tokens(TokenBatch(1, [first], [5], [], cached=[(first, 2)]))
    assert client.generation.cached_tokens == 2
    world.decode_fails(first, "capacity")
    assert client.generation.cached_tokens == 2, "no other attempt has begun to answer"
    world.emit(world.room(client.generation), 6, finish="length")
    assert client.tokens == [5, 6] and client.generation.cached_tokens == 0
