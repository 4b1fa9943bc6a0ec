"""A connection between the router and an instance breaks: what it lost is sent again within two heartbeats, without
another attempt, and requests that only wait are left alone."""

from __future__ import annotations

import pytest
from cluster_process import CONFIG, DEADLINES, Process
from cluster_world import Client, RoutedWorld
from support.fake_transport import Fault, FaultKind

from chitu.errors import NoInstance, TransferFailed
from chitu.instance.requests import REPEATS
from chitu.router.generation import GenerationState
from chitu.types import Role

BEAT_S = DEADLINES.heartbeat_interval_s
NOTICED_S = 2 * BEAT_S + 0.1
"""Time to notice a loss: two heartbeats, and some turns for the messages themselves."""
LATE_S = 3.0
"""Far more than a loss takes to be noticed."""


def attempts(client: Client) -> int:
    assert client.generation is not None
    return client.generation.num_attempts


def ask(world: RoutedWorld, num_tokens: int = 9, max_tokens: int = 5, is_read_singly: bool = True) -> Client:
    return world.request(num_tokens, max_tokens, is_read_singly=is_read_singly)


def serving(world: RoutedWorld, client: Client, role: Role) -> Process:
    assert client.generation is not None and client.generation.attempt is not None
    attempt = client.generation.attempt
    key = attempt.decode if role is Role.DECODE else attempt.prefill
    return next(process for process in world.processes if key and process.incarnation == key.incarnation)


def seconds_until_next_attempt(world: RoutedWorld, client: Client) -> float:
    start_s = world.clock.monotonic()
    while attempts(client) == 1:
        world.turns(1)
        assert world.clock.monotonic() - start_s < LATE_S, "nobody noticed"
    return world.clock.monotonic() - start_s


def seconds_until_it_is_there(world: RoutedWorld, process: Process, room: bytes) -> float:
    start_s = world.clock.monotonic()
    while room not in process.sequences():
        world.turns(1)
        assert world.clock.monotonic() - start_s < LATE_S, "nobody noticed"
    return world.clock.monotonic() - start_s


def room_of(client: Client) -> bytes:
    assert client.generation is not None and client.generation.attempt is not None
    return client.generation.attempt.room


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("phase", range(5))
def test_a_lost_half_comes_again_within_two_heartbeats_and_is_served_by_the_same_attempt(
    role: Role, phase: int
) -> None:
    """`phase` is the moment between two heartbeats."""
    world = RoutedWorld(1, 1)
    world.turns(10 * phase)
    client = ask(world)
    process = serving(world, client, role)
    world.lose_orders(process)
    assert seconds_until_it_is_there(world, process, room_of(client)) <= NOTICED_S
    world.settle_down(3.0)
    assert client.end == "finished" and attempts(client) == 1


def test_a_gap_is_told_at_once() -> None:
    world = RoutedWorld(1, 1)
    world.turns(2)
    lost = ask(world)
    process = serving(world, lost, Role.DECODE)
    world.lose_orders(process)
    ask(world)
    assert seconds_until_it_is_there(world, process, room_of(lost)) < 0.1


@pytest.mark.parametrize("phase", range(0, 50, 7))
@pytest.mark.parametrize(("count", "is_read_singly"), [(1, True), (3, True), (7, True), (1, False)])
def test_lost_tokens_come_again_within_two_heartbeats_and_cost_no_attempt(
    phase: int, count: int, is_read_singly: bool
) -> None:
    """`count` messages in a row are lost; if these are all messages, no later one shows the gap."""
    world = RoutedWorld(1, 1)
    world.turns(phase)
    client = ask(world, max_tokens=8, is_read_singly=is_read_singly)
    while client.generation is None or not client.generation.num_emitted:
        world.turns(1)
    world.cuts[serving(world, client, Role.DECODE).incarnation] = count
    start_s = world.clock.monotonic()
    while not client.end:
        world.turns(1)
        assert world.clock.monotonic() - start_s <= 2 * NOTICED_S
    assert client.end == "finished" and attempts(client) == 1
    world.settle_down()


def test_tokens_that_never_come_through_are_given_up_after_a_lease_and_the_request_goes_on_behind_them() -> None:
    world = RoutedWorld(1, 2)
    client = ask(world, max_tokens=26)
    while not client.tokens:
        world.turns(1)
    world.turns(5)
    decode = serving(world, client, Role.DECODE)
    world.cuts[decode.incarnation] = 1_000_000
    world.turns(int((DEADLINES.lease_s + 3 * BEAT_S) / 0.01))
    assert not client.end and attempts(client) == 1
    world.cuts.clear()
    world.settle_down(3.0)
    assert client.end == "finished" and attempts(client) == 2
    assert world.router is not None and world.router.metrics().retries == {"tokens_lost": 1}


def test_an_aborted_request_whose_half_comes_again_is_ended_by_what_comes_behind_it() -> None:
    world = RoutedWorld(1, 1)
    client = ask(world)
    p = serving(world, client, Role.PREFILL)
    world.lose_orders(p)
    assert client.generation is not None and world.router is not None
    world.router.cancel(client.generation)
    start_s = world.clock.monotonic()
    while not any(incarnation == p.incarnation for incarnation, _ in world.handed_over):
        world.turns(1)
        assert world.clock.monotonic() - start_s <= NOTICED_S
    world.turns(3)
    assert not p.sequences()
    world.settle_down(3.0)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_cut_under_load_that_takes_the_next_messages_too_costs_each_request_a_second_at_most(role: Role) -> None:
    world = RoutedWorld()
    clients = [ask(world, 9 + n, 6) for n in range(6)]
    broken = world.of(role)[0]
    world.lose_orders(broken)
    world.sever(broken, 3)
    clients += [ask(world, 9 + n, 6) for n in range(4)]
    start_s = world.clock.monotonic()
    while any(not client.end for client in clients):
        world.turns(1)
        assert world.clock.monotonic() - start_s < 4 * BEAT_S + 0.5
    assert {client.end for client in clients} == {"finished"}
    assert world.router is not None and not world.router.metrics().retries
    world.settle_down()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_waits_for_a_stopped_process_is_not_lost(role: Role) -> None:
    world = RoutedWorld(1, 1)
    world.turns(2)
    stopped = world.of(role)[0]
    stopped.is_frozen = True
    client = ask(world)
    world.turns(int(0.8 * DEADLINES.lease_s / 0.01))
    assert attempts(client) == 1
    stopped.is_frozen = False
    world.settle_down(3.0)
    assert client.end == "finished" and attempts(client) == 1


def test_a_slow_step_thread_is_no_loss() -> None:
    world = RoutedWorld(1, 1)
    slow = world.of(Role.PREFILL)[0]
    slow.is_slow = True
    client = ask(world)
    world.turns(int(3 * BEAT_S / 0.01))
    assert attempts(client) == 1
    world.settle_down(3.0)
    assert client.end == "finished" and attempts(client) == 1


def test_a_lost_cancellation_is_sent_again_long_before_the_deadline_of_whom_it_was_for() -> None:
    """P has its half, D has not, and the client leaves: P alone would wait for the announcement for `queue_s` and
    `bootstrap_s`."""
    world = RoutedWorld(1, 1)
    (p,), (d,) = world.of(Role.PREFILL), world.of(Role.DECODE)
    client = ask(world)
    world.lose_orders(d)
    world.turns(3)
    assert p.sequences() and client.generation is not None and world.router is not None
    world.router.cancel(client.generation)
    world.lose_orders(p)
    start_s = world.clock.monotonic()
    while p.sequences():
        world.turns(1)
    assert world.clock.monotonic() - start_s <= NOTICED_S < DEADLINES.queue_s + DEADLINES.bootstrap_s
    world.settle_down(3.0)


def test_where_no_connection_comes_about_requests_go_elsewhere_after_a_lease() -> None:
    """No message of the router reaches D0, whose heartbeats arrive: what was sent waits in a queue forever."""
    world = RoutedWorld()
    d0 = next(process for process in world.of(Role.DECODE) if process.rank == 0)
    world.sever(d0, 1_000_000)
    clients = [ask(world) for _ in range(4)]
    start_s = world.clock.monotonic()
    while any(not client.end for client in clients):
        world.turns(1)
    assert {client.end for client in clients} == {"finished"}
    assert world.clock.monotonic() - start_s <= DEADLINES.lease_s + 3 * BEAT_S
    assert CONFIG.retry.max_attempts == 4
    world.settle_down()


def test_ps_word_of_a_failure_may_be_lost_and_is_said_again_with_the_next_heartbeats_and_heard_once() -> None:
    world = RoutedWorld()
    client = ask(world)
    p = serving(world, client, Role.PREFILL)
    p.is_slow = True  # so that nothing else ends the attempt
    world.muted[p.incarnation] = 2
    assert client.generation is not None and client.generation.attempt is not None and world.router is not None
    p.core.report_failure(client.generation.attempt.room, TransferFailed("a write failed"))
    assert seconds_until_next_attempt(world, client) <= NOTICED_S
    world.settle_down(3.0)
    world.turns(int(REPEATS * BEAT_S / 0.01))
    assert client.end == "finished" and world.router.metrics().retries == {"transfer_failed": 1}


def silence(world: RoutedWorld, prefill: Process, decode: Process, ways: str) -> None:
    if "to P" in ways:
        world.silence.add((decode.incarnation, prefill.info.control_port))
    if "to D" in ways:
        world.silence.add((prefill.incarnation, decode.info.control_port))


HEARD_S = 3 * DEADLINES.retry_interval_s + BEAT_S + 0.1
"""Time to notice a silent peer: the announcement, two registrations, and D's heartbeat."""


@pytest.mark.parametrize("ways", ["to P and to D", "to P", "to D"])
def test_a_pair_whose_two_do_not_hear_each_other_is_left_after_the_first_silence_and_taken_again(ways: str) -> None:
    world = RoutedWorld(2, 2)
    first = ask(world)
    prefill, decode = (serving(world, first, role) for role in (Role.PREFILL, Role.DECODE))
    silence(world, prefill, decode, ways)
    assert seconds_until_next_attempt(world, first) <= HEARD_S < DEADLINES.transfer_s
    for _ in range(8):
        client = ask(world)
        assert client.generation is not None and client.generation.attempt is not None
        pair = serving(world, client, Role.PREFILL), serving(world, client, Role.DECODE)
        assert pair != (prefill, decode)
        world.turns(30)
        assert (client.end, attempts(client)) == ("finished", 1)
    assert world.router is not None and world.router.counters.breaker_openings == {}
    world.silence.clear()
    world.turns(100)
    for _ in range(2):  # every pair gets requests
        clients = [ask(world) for _ in range(4)]
        pairs = [(serving(world, c, Role.PREFILL), serving(world, c, Role.DECODE)) for c in clients]
        world.settle_down(3.0)
        if (prefill, decode) in pairs:
            break
    assert (prefill, decode) in pairs and all(attempts(client) == 1 for client in clients)


@pytest.mark.parametrize("state", [GenerationState.EARLY, GenerationState.DECODE])
def test_kv_that_does_not_arrive_behind_the_first_token_moves_too(state: GenerationState) -> None:
    world = RoutedWorld(2, 2)
    client = ask(world, num_tokens=30)
    prefill, decode = (serving(world, client, role) for role in (Role.PREFILL, Role.DECODE))
    while client.generation is None or client.generation.state is not state:
        world.turns(1)
    assert decode.scheduler is not None and attempts(client) == 1 and len(client.tokens) == 1
    silence(world, prefill, decode, "to P and to D")
    if state is GenerationState.EARLY:  # D waits for P's answer to its abortion
        world.turns(100)
        world.silence.clear()
    world.settle_down(3.0 + DEADLINES.transfer_s)
    assert client.end == "finished"


def test_the_only_pair_is_not_left_for_its_silence() -> None:
    world = RoutedWorld(1, 1)
    client = ask(world)
    silence(world, world.of(Role.PREFILL)[0], world.of(Role.DECODE)[0], "to P and to D")
    world.advance(DEADLINES.bootstrap_s * 0.8)
    assert attempts(client) == 1
    world.silence.clear()
    world.settle_down(3.0)
    assert client.end == "finished" and attempts(client) == 1


# ---------------------------------------------------------------------------- a P whose write to a D may still land


def write_late(world: RoutedWorld, client: Client) -> tuple[Process, Process]:
    """Let the next write to the client's D fail, with bytes that may land at any time. Return its P and D once the
    router knows."""
    prefill, decode = (serving(world, client, role) for role in (Role.PREFILL, Role.DECODE))
    world.fabric.inject(Fault(FaultKind.LATE, to=decode.session))
    assert world.router is not None
    for _ in range(200):
        if world.router._members.num_cut_off:
            return prefill, decode
        world.turns(1)
    raise AssertionError("no pair is suspended")


def test_the_only_pair_answers_at_once_while_a_write_may_land_and_serves_when_it_cannot() -> None:
    world = RoutedWorld(1, 1)
    client = ask(world)
    _, decode = write_late(world, client)
    world.turns(20)
    assert client.end == "transfer_failed" and attempts(client) <= 2, "one may be sent before the heartbeat"
    router = world.router
    assert router is not None and router.why_unusable().startswith("no pair can serve: P0 does not write to D0")
    before = router.counters.attempts, world.fabric.num_writes
    for _ in range(8):
        with pytest.raises(NoInstance):
            world.request(9, 5)
        world.turns(10)
    assert (router.counters.attempts, world.fabric.num_writes) == before
    assert router.counters.breaker_openings == {}
    assert decode.cache.allocator.num_quarantined, "a late write may still reach these pages"
    assert world.fabric.release_late_writes() == 1
    world.settle_down(3.0)
    world.turns(60)  # the next heartbeat arrives
    assert router.why_unusable() == "" and not decode.cache.allocator.num_quarantined
    again = ask(world)
    world.settle_down(3.0)
    assert again.end == "finished" and attempts(again) == 1


def test_a_pair_without_writes_costs_no_request_an_attempt_while_others_serve() -> None:
    world = RoutedWorld(2, 2)
    client = ask(world)
    suspended = write_late(world, client)
    assert world.router is not None and world.router.why_unusable() == ""
    for _ in range(12):
        other = ask(world)
        assert (serving(world, other, Role.PREFILL), serving(world, other, Role.DECODE)) != suspended
        world.turns(30)
        assert (other.end, attempts(other)) == ("finished", 1)
    assert client.end == "finished" and attempts(client) <= 3
    world.fabric.release_late_writes()
    world.settle_down(3.0)
    world.turns(60)  # the next heartbeat arrives
    pairs = set()
    for _ in range(4):  # every pair gets requests
        clients = [ask(world) for _ in range(4)]
        pairs |= {(serving(world, c, Role.PREFILL), serving(world, c, Role.DECODE)) for c in clients}
        world.settle_down(3.0)
    assert suspended in pairs


def test_a_p_that_computes_for_long_is_not_silent() -> None:
    """Meanwhile it sends nothing about its rooms, but answers questions."""
    world = RoutedWorld(2, 2)
    client = ask(world)
    serving(world, client, Role.PREFILL).is_slow = True
    for _ in range(20):
        world.turns(10)
        assert all(not process.kv.side.silent_prefills for process in world.of(Role.DECODE))
    assert not client.tokens and attempts(client) == 1
