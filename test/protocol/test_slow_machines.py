"""A deadline is silence, not slowness: what takes longer than `transfer_s` is served as long as P advances."""

from __future__ import annotations

import pytest
from cluster_process import DEADLINES, STEP_S, Process
from cluster_world import Client, SlowRoutedWorld, SlowWorld

from chitu.kv_transfer.receiver import ReceiverState
from chitu.protocol import TransferInfo, TransferProgress, encode, peer_codec
from chitu.types import Role

LONG_TOKENS = 55
"""11 chunks: 9.9 s on a slow machine."""


def of_role(world: SlowWorld | SlowRoutedWorld, role: Role) -> Process:
    return world.of(role)[0]


def ask(world: SlowRoutedWorld, num_tokens: int, max_tokens: int = 2) -> Client:
    client = world.request(num_tokens, max_tokens)
    assert client.generation is not None
    return client


def breakers(world: SlowRoutedWorld) -> set[str]:
    assert world.router is not None
    return {state for states in world.router.metrics().breakers.values() for state in states}


def test_a_prompt_that_computes_for_three_times_transfer_s_is_answered_in_its_first_attempt_beside_short_ones() -> None:
    assert 3 * DEADLINES.transfer_s < LONG_TOKENS / 5 * STEP_S
    world = SlowRoutedWorld(1, 1)
    long, short = ask(world, LONG_TOKENS), [ask(world, 4)]
    for _ in range(3):
        world.turns(round(2 * STEP_S / 0.01))
        short.append(ask(world, 4))
    world.settle_down(12.0)
    for client in (long, *short):
        assert client.generation is not None
        assert (client.end, client.generation.num_attempts) == ("finished", 1)
    assert breakers(world) == {"closed"}


def test_a_prompt_that_waits_behind_others_for_longer_than_transfer_s_is_answered() -> None:
    """It computes nothing meanwhile: the steps before it are full."""
    world = SlowWorld(1, 1)
    p = of_role(world, Role.PREFILL)
    asked = [world.ask(0, 22, 1, prompt=[100 * number + at for at in range(22)]) for number in range(4)]
    last = asked[-1]
    assert last is not None
    waited_s, began_s = 0.0, world.clock.monotonic()
    while not last.end:
        world.turns(1)
        sequence = p.sequences().get(last.room)
        if sequence is not None and sequence.prompt.announced and not sequence.kv_len:
            waited_s = world.clock.monotonic() - began_s
    assert waited_s > DEADLINES.transfer_s
    world.settle_down(12.0)
    assert [each and each.end for each in asked] == ["finished"] * 4


@pytest.mark.parametrize("stops", ["P's steps", "the frames of P"])
def test_a_p_that_stops_within_a_prompt_fails_after_transfer_s_and_no_breaker_opens(stops: str) -> None:
    world = SlowRoutedWorld(1, 1)
    p, d = of_role(world, Role.PREFILL), of_role(world, Role.DECODE)
    client = ask(world, LONG_TOKENS)
    world.turns(round(1.2 * DEADLINES.transfer_s / 0.01))
    assert client.generation is not None and client.generation.num_attempts == 1
    if stops == "P's steps":
        p.is_slow = True
    else:
        world.silence = {(p.incarnation, d.port)}
    began_s = world.clock.monotonic()
    while client.generation.num_attempts == 1:
        world.turns(1)
        assert world.clock.monotonic() - began_s < 2 * DEADLINES.transfer_s
    waited_s = world.clock.monotonic() - began_s
    assert DEADLINES.transfer_s - STEP_S - 0.4 <= waited_s <= DEADLINES.transfer_s + 0.1
    (record,) = client.generation.ended
    assert record.error == "transfer_stalled"
    world.silence = set()
    assert breakers(world) == {"closed"}


def test_a_prompt_that_was_given_up_computes_no_further_chunk() -> None:
    world = SlowWorld(1, 1)
    p = of_role(world, Role.PREFILL)
    asked = world.ask(0, LONG_TOKENS, 2)
    assert asked is not None
    while p.scheduler.load.prompt_tokens < 15:
        world.turns(1)
    world.end(asked, "cancelled")
    other = world.ask(0, 4, 2)
    world.settle_down(12.0)
    assert other is not None and other.end == "finished"
    assert p.scheduler.load.prompt_tokens == 15 + 4


class WatchedWorld(SlowWorld):
    def __init__(self) -> None:
        self.sent: list[object] = []
        """Messages between P and D."""
        super().__init__(1, 1)

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        self.sent.append(peer_codec.decode(payload))
        super().link(host, port, room, payload)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


def test_d_repeats_no_announcement_once_p_reports_that_the_room_advances() -> None:
    world = WatchedWorld()
    world.ask(0, LONG_TOKENS, 2)
    while not world.count(TransferProgress):
        world.turns(1)
    world.turns(3)
    world.sent.clear()
    world.turns(round(DEADLINES.transfer_s / 0.01))
    assert world.count(TransferInfo) == 0
    assert 3 <= world.count(TransferProgress) <= 10, "ten within transfer_s at most, one a step at most"


def test_short_prompts_need_no_reports() -> None:
    world = WatchedWorld()
    asked = world.ask(0, 4, 2)
    world.settle_down(12.0)
    assert asked is not None and asked.end == "finished" and not world.count(TransferProgress)


def test_an_old_report_that_comes_again_buys_no_time() -> None:
    world = SlowWorld(1, 1)
    p, d = of_role(world, Role.PREFILL), of_role(world, Role.DECODE)
    asked = world.ask(0, LONG_TOKENS, 2)
    assert asked is not None
    table = d.kv.side.machine.table
    while (entry := table.get(asked.room)) is None or entry.data.num_advances < 2:
        world.turns(1)
    p.is_slow = True
    world.turns(round((STEP_S + 0.5) / 0.01))  # the last report of it is here
    assert entry.state is ReceiverState.WAITING
    newest, deadline_s = entry.data.num_advances, entry.deadline_s
    for number in (0, 1, newest):
        d.on_frame(asked.room, encode(TransferProgress(p.incarnation, number)))
    d.on_frame(asked.room, encode(TransferProgress(99, newest + 1)))
    assert entry.deadline_s == deadline_s, "not of its P, or not new"
    d.on_frame(asked.room, encode(TransferProgress(p.incarnation, newest + 1)))
    assert entry.deadline_s == world.clock.monotonic() + DEADLINES.transfer_s


def test_a_report_for_a_room_that_is_over_changes_nothing() -> None:
    world = SlowWorld(1, 1)
    p, d = of_role(world, Role.PREFILL), of_role(world, Role.DECODE)
    asked = world.ask(0, LONG_TOKENS, 2)
    assert asked is not None
    while d.kv.side.state(asked.room) is not ReceiverState.WAITING:
        world.turns(1)
    p.is_frozen = True
    world.end(asked, "cancelled")
    world.turns(3)
    d.on_frame(asked.room, encode(TransferProgress(p.incarnation, 9)))
    assert d.kv.side.state(asked.room) is ReceiverState.QUARANTINED
    world.settle_down(12.0)
    d.on_frame(asked.room, encode(TransferProgress(p.incarnation, 10)))
    assert d.kv.side.state(asked.room) is None


class SilentWorld(SlowWorld):
    """Every report that a room advances is lost: the planted fault."""

    def link(self, host: str, port: int, room: bytes, payload: bytes) -> None:
        if not isinstance(peer_codec.decode(payload), TransferProgress):
            super().link(host, port, room, payload)


def test_a_p_that_reports_nothing_is_taken_for_silent() -> None:
    world = SilentWorld(1, 1)
    asked = world.ask(0, LONG_TOKENS, 2)
    world.settle_down(12.0)
    assert asked is not None and asked.end == "transfer_timeout"
    assert "D0 waited 3.0 s in WAITING for P0's logits (deadlines.transfer_s)" in asked.message


def test_the_planted_p_serves_what_is_short() -> None:
    world = SilentWorld(1, 1)
    asked = world.ask(0, 4, 2)
    world.settle_down(12.0)
    assert asked is not None and asked.end == "finished"
