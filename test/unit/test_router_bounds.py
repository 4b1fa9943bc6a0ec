"""What bounds the attempts of a request: deaths under it, cuts without a token, failures for another reason. Also what
becomes of requests on a P and a D that cannot reach each other."""

from __future__ import annotations

import pytest
from router_world import ONE_TRY, Client, World, pair, two_pairs

from chitu.config.schema import BreakerConfig, RetryConfig
from chitu.errors import NoInstance, RequestLost, TokensLost
from chitu.net.http import error_headers
from chitu.protocol import Heartbeat, LoadReport, SamplingParams, TokenBatch
from chitu.router.retry import MAX_CUTS, MAX_DEATHS, Failure
from chitu.types import Role

MANY = RetryConfig(max_attempts=99)


def code(client: Client) -> str:
    """Return the code of the client's error; empty while it runs or if it was served."""
    assert client.generation is not None
    return client.generation.error.code if client.generation.error is not None else ""


def three_pairs(retry: RetryConfig = MANY) -> World:
    return World(*[Role.PREFILL] * 3, *[Role.DECODE] * 3, retry=retry)


def hosts(world: World, client: Client) -> dict[Role, int]:
    """Return the ranks of the client's pair."""
    prefill, decode = world.pair(client.generation).split("-")
    return {Role.PREFILL: int(prefill[1:]), Role.DECODE: int(decode[1:])}


# --------------------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize(("role", "tokens"), [(Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 3)])
def test_a_request_under_which_two_instances_died_is_not_sent_to_a_third(role: Role, tokens: int) -> None:
    world = three_pairs()
    client = world.add_client()
    for _ in range(MAX_DEATHS):
        assert code(client) == ""
        world.emit(world.room(client.generation), *range(tokens))
        world.lose(role, hosts(world, client)[role])
    assert code(client) == "poison_request" and world.router.in_flight == 0
    counters = world.router.counters
    assert (counters.attempts, counters.failed) == (MAX_DEATHS, {"poison_request": 1})
    error = client.generation.error  # type: ignore[union-attr]
    assert error is not None and error.http_status == 500 and not error.retryable
    assert error_headers(error) == [(b"x-should-retry", b"false")], (
        "OpenAI's clients try again after a 500, if not told"
    )


def test_unified_instances_die_of_it_too() -> None:
    world = World(*[Role.UNIFIED] * 3, retry=MANY)
    client = world.add_client()
    for _ in range(MAX_DEATHS):
        world.lose(Role.UNIFIED, int(world.pair(client.generation)[1:]))
    assert code(client) == "poison_request"


def test_who_is_restarted_in_between_is_another_instance() -> None:
    world = pair(retry=MANY)
    client = world.add_client()
    world.join(Role.DECODE, 1)
    world.lose(Role.DECODE, 0)
    world.join(Role.DECODE, 0)
    assert world.pair(client.generation) in ("P0-D0", "P0-D1")
    world.lose(Role.DECODE, hosts(world, client)[Role.DECODE])
    assert code(client) == "poison_request"


@pytest.mark.parametrize("order", [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)])
def test_both_of_a_pair_that_die_together_are_one_accident(order: tuple[Role, Role]) -> None:
    """Both were killed, or their host is gone: the second death is seen when the next attempt has begun already."""
    world = two_pairs(retry=MANY)
    clients = [world.add_client() for _ in range(4)]
    for role in order:
        world.lose(role, 0)
    assert [code(client) for client in clients] == [""] * 4
    assert {world.pair(client.generation) for client in clients} == {"P1-D1"}


def test_a_death_that_the_other_half_reports_before_the_router_sees_it_counts() -> None:
    world = three_pairs()
    client = world.add_client()
    for _ in range(MAX_DEATHS):
        prefill = hosts(world, client)[Role.PREFILL]
        world.decode_fails(world.room(client.generation), "prefill_lost")
        world.lose(Role.PREFILL, prefill)  # by then the request is on another P
    assert code(client) == "poison_request"
    client = world.add_client()
    decode = hosts(world, client)[Role.DECODE]
    world.fails(world.pair(client.generation).split("-")[0], world.room(client.generation), "decode_lost")
    world.lose(Role.DECODE, decode)
    world.lose(Role.DECODE, hosts(world, client)[Role.DECODE])
    assert code(client) == "poison_request"


@pytest.mark.parametrize("has_died", [True, False])
def test_a_p_that_died_behind_the_first_token_counts_where_d_says_that_kv_was_missing(has_died: bool) -> None:
    world = three_pairs()
    client = world.add_client()
    world.emit(world.room(client.generation), 1)
    world.lose(Role.PREFILL, hosts(world, client)[Role.PREFILL], has_died)
    world.decode_fails(world.room(client.generation), "prefill_lost")
    world.lose(Role.DECODE, hosts(world, client)[Role.DECODE])
    assert code(client) == ("poison_request" if has_died else "")


def test_a_p_that_died_long_after_it_had_done_with_a_request_does_not_count() -> None:
    world = three_pairs()
    client = world.add_client()
    world.emit(world.room(client.generation), 1, 2, 3)
    world.lose(Role.PREFILL, hosts(world, client)[Role.PREFILL])
    world.lose(Role.DECODE, hosts(world, client)[Role.DECODE])
    assert code(client) == ""


def test_silence_and_goodbyes_are_no_deaths() -> None:
    world = World(*[Role.PREFILL] * 4, *[Role.DECODE] * 4)
    client = world.add_client()
    for _ in range(2):
        world.lose(Role.DECODE, hosts(world, client)[Role.DECODE], has_died=False)
    assert code(client) == ""
    world.lose(Role.DECODE, hosts(world, client)[Role.DECODE], has_died=False)
    assert code(client) == "decode_lost", "by max_attempts"


def test_what_an_instance_says_of_itself_is_no_death() -> None:
    """P and D end what they run with these codes if they lose the router."""
    world = three_pairs()
    client = world.add_client()
    for _ in range(3):
        world.decode_fails(world.room(client.generation), "decode_lost")
        world.fails(world.pair(client.generation).split("-")[0], world.room(client.generation), "prefill_lost")
    assert code(client) == ""


# ----------------------------------------------------------------------------------------------------------------- cuts


class Links:
    """Token messages with sequence numbers, some of which get lost."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.numbers: dict[int, int] = {}

    def send(self, client: Client, *tokens: int, lost: int = 0) -> None:
        """Send tokens for the client from its D, after `lost` messages that D gave up."""
        attempt = client.generation.attempt  # type: ignore[union-attr]
        assert attempt is not None
        number = self.numbers[attempt.decode.incarnation] = self.numbers.get(attempt.decode.incarnation, 0) + lost + 1
        link = self.world.link(attempt.pair[-2:])
        batch = TokenBatch(attempt.decode.incarnation, [attempt.room] * len(tokens), list(tokens), [], number, link)
        self.world.router.on_tokens(batch)
        self.world.router.flush()


def test_cuts_that_let_tokens_through_in_between_use_up_no_attempts() -> None:
    world = two_pairs()
    links, client = Links(world), world.add_client(sampling=SamplingParams(max_tokens=1000))
    for n in range(4 * MAX_CUTS):
        links.send(client, n)
        links.send(client, 999, lost=1)
    assert code(client) == "" and client.tokens == list(range(4 * MAX_CUTS))
    world.emit(world.room(client.generation), 7, finish="stop")
    assert client.tokens[-1] == 7 and world.router.counters.retries == {"tokens_lost": 4 * MAX_CUTS}


def test_cuts_without_a_token_in_between_are_bounded() -> None:
    world = two_pairs()
    links, client = Links(world), world.add_client()
    for _ in range(MAX_CUTS - 1):
        links.send(client, lost=1)
    links.send(client, 1)
    for _ in range(1 + MAX_CUTS):  # the first attempt had brought a token
        assert code(client) == ""
        links.send(client, lost=1)
    assert code(client) == "tokens_lost"
    assert world.router.counters.attempts == 2 * MAX_CUTS


def test_cuts_in_between_lend_no_further_attempts_to_other_failures() -> None:
    world = two_pairs()
    links, client = Links(world), world.add_client()
    for n in range(3):
        assert code(client) == ""
        links.send(client, n)
        links.send(client, lost=1)
        world.decode_fails(world.room(client.generation), "transfer_failed")
    assert code(client) == "transfer_failed"


def test_one_attempt_means_none_more_after_a_cut() -> None:
    world = two_pairs(retry=ONE_TRY)
    links, client = Links(world), world.add_client()
    links.send(client, 1)
    links.send(client, lost=1)
    assert code(client) == "tokens_lost"


def test_an_instance_that_no_connection_reaches_is_not_cut_off_by_chance() -> None:
    """Its attempts count, since each of them lasts a lease."""
    error = RequestLost("D0 is alive, but did not receive a message")
    assert not Failure(error, frozenset()).is_cut and Failure(TokensLost("given up"), frozenset()).is_cut


def test_breakers_of_who_is_gone_are_not_made_again() -> None:
    world = two_pairs(breaker=BreakerConfig(failures=1))
    clients = [world.add_client() for _ in range(4)]
    world.lose(Role.DECODE, 0)
    for client in clients:
        world.decode_fails(world.room(client.generation), "transfer_failed")
    world.lose(Role.PREFILL, 0)
    present = {(i.role, i.engine_rank) for i in world.instances}
    assert {(key.role, key.engine_rank) for key in world.router._members.blocked(0.0)} <= present
    assert "D0" not in world.router.counters.breaker_openings


# ------------------------------------------------------------------------------------ a P and a D without a connection


def beat(world: World, name: str, *silent: str) -> None:
    """Send a heartbeat of this D, which receives nothing from the P in `silent`."""
    decode, incarnations = world.instance(name), tuple(world.instance(p).incarnation for p in silent)
    world.router.on_heartbeat(
        Heartbeat(decode.role, decode.engine_rank, decode.incarnation, LoadReport(), silent=incarnations)
    )


def test_a_silent_pair_is_left_out_and_no_instance_for_all_of_it() -> None:
    world = two_pairs(max_in_flight=99)
    clients = [world.add_client() for _ in range(12)]
    on_it = [client for client in clients if world.pair(client.generation) == "P0-D0"]
    _, started, decoding = on_it
    world.emit(world.room(started.generation), 1)
    world.emit(world.room(decoding.generation), 1, 2)
    beat(world, "D0", "P0")
    assert [c.generation.num_attempts for c in on_it if c.generation is not None] == [2, 2, 1]
    pairs = {world.pair(world.add_client().generation) for _ in range(12)}
    assert pairs == {"P0-D1", "P1-D0", "P1-D1"}
    assert world.router.counters.breaker_openings == {}
    assert world.router.counters.retries == {"bootstrap_timeout": 2}
    beat(world, "D0")
    assert "P0-D0" in {world.pair(world.add_client().generation) for _ in range(12)}


def test_a_p_that_no_d_hears_gets_nothing() -> None:
    world = two_pairs(max_in_flight=99)
    beat(world, "D0", "P0")
    beat(world, "D1", "P0")
    assert {world.pair(world.add_client().generation) for _ in range(8)} == {"P1-D0", "P1-D1"}
    world.lose(Role.DECODE, 1)
    world.join(Role.DECODE, 1)
    assert {world.pair(world.add_client().generation) for _ in range(8)} == {"P0-D1", "P1-D0", "P1-D1"}


def suspend(world: World, name: str, *ranks: int) -> None:
    """Send a heartbeat of this P, which does not write to the D of these ranks."""
    prefill = world.instance(name)
    load = LoadReport(suspended=ranks)
    world.router.on_heartbeat(Heartbeat(prefill.role, prefill.engine_rank, prefill.incarnation, load))


def test_a_pair_without_writes_is_left_out_until_they_are_fenced() -> None:
    world = two_pairs(max_in_flight=99)
    suspend(world, "P0", 0)
    assert {world.pair(world.add_client().generation) for _ in range(12)} == {"P0-D1", "P1-D0", "P1-D1"}
    assert world.router.why_unusable() == ""
    suspend(world, "P0")
    assert "P0-D0" in {world.pair(world.add_client().generation) for _ in range(12)}


def test_the_only_pair_without_writes_costs_no_attempt_and_is_named() -> None:
    world = pair()
    client = world.add_client()
    suspend(world, "P0", 0)
    reason = "no pair can serve: P0 does not write to D0 until a write that failed can no longer land"
    assert world.router.why_unusable() == reason
    with pytest.raises(NoInstance, match=reason) as refusal:
        world.add_client()
    assert error_headers(refusal.value) == [(b"retry-after", b"1")] and refusal.value.http_status == 503
    world.decode_fails(world.room(client.generation), "transfer_failed")
    assert code(client) == "transfer_failed"
    counters = world.router.counters
    assert (counters.attempts, counters.retries, counters.rejected) == (1, {}, {"no_instance": 1})
    suspend(world, "P0")
    assert world.router.why_unusable() == "" and world.pair(world.add_client().generation) == "P0-D0"


def test_of_pairs_that_are_all_cut_off_a_silent_one_is_tried_and_none_without_writes() -> None:
    world = two_pairs(max_in_flight=99)
    suspend(world, "P0", 0, 1)
    suspend(world, "P1", 1)
    beat(world, "D0", "P1")
    assert world.router.why_unusable() == (
        "no pair can serve: P0 does not write to D0 until a write that failed can no longer land; "
        "P0 does not write to D1 until a write that failed can no longer land; D0 receives nothing from P1; "
        "P1 does not write to D1 until a write that failed can no longer land"
    )
    assert {world.pair(world.add_client().generation) for _ in range(8)} == {"P1-D0"}
    suspend(world, "P1", 0, 1)
    with pytest.raises(NoInstance):
        world.add_client()
    world.lose(Role.PREFILL, 1)
    world.join(Role.PREFILL, 1)
    assert {world.pair(world.add_client().generation) for _ in range(8)} == {"P1-D0", "P1-D1"}


def test_a_retry_goes_back_to_an_instance_that_failed_rather_than_to_a_pair_without_writes() -> None:
    world = two_pairs(max_in_flight=99)
    client = world.add_client()
    assert world.pair(client.generation) == "P0-D0"
    suspend(world, "P0", 0)
    suspend(world, "P1", 1)
    world.decode_fails(world.room(client.generation), "transfer_failed")
    assert world.pair(client.generation) in ("P0-D1", "P1-D0")


def test_a_unified_instance_serves_what_no_pair_can() -> None:
    world = World(Role.PREFILL, Role.DECODE, Role.UNIFIED)
    suspend(world, "P0", 0)
    client = world.add_client()
    assert client.generation is not None and client.generation.attempt is not None
    assert client.generation.attempt.decode.role is Role.UNIFIED and world.router.why_unusable() == ""


def test_what_no_other_pair_can_take_stays_and_is_taken_as_before() -> None:
    world = two_pairs(max_in_flight=99)
    clients = [world.add_client() for _ in range(4)]
    beat(world, "D0", "P0", "P1")
    assert {world.pair(client.generation) for client in clients} == {"P0-D1", "P1-D1"}
    before = [world.room(client.generation) for client in clients]
    beat(world, "D1", "P0", "P1")
    assert [world.room(client.generation) for client in clients] == before
    assert {world.pair(world.add_client().generation) for _ in range(8)} == {"P0-D0", "P0-D1", "P1-D0", "P1-D1"}
    alone = World(Role.PREFILL, Role.DECODE, Role.DECODE)
    client = alone.add_client()
    assert alone.pair(client.generation) == "P0-D0"
    beat(alone, "D0", "P0")
    assert alone.pair(client.generation) == "P0-D1", "the same P, which another D hears"


def test_a_silence_that_comes_and_goes_fails_nobody() -> None:
    world = two_pairs()
    client = world.add_client()
    for _ in range(2 * MAX_CUTS):
        prefill, decode = world.pair(client.generation).split("-")
        for name in ("D0", "D1"):
            beat(world, name, *([prefill] if name == decode else []))
    assert code(client) == "" and client.generation is not None
    assert client.generation.num_attempts == MAX_CUTS
