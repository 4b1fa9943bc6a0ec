"""Whole P and D under scripts of faults: whatever happens, each request ends once, right and in time, and no page is
lost.

A failing script is shrunk and printed as the list of `Op` that `Cluster.play` takes: add it to
`test_cluster_situations.py` as a test of its own. `CHITU_NIGHTLY=1` draws a thousand of each kind.
"""

from __future__ import annotations

import random

import pytest
from cluster import Op
from cluster_process import LateProcess, Writes
from cluster_world import ClusterWorld, LateRoutedWorld, LateWorld, RoutedWorld, SlowRoutedWorld, SlowWorld
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from pd_node import AUX_ROW_BYTES, PAGE_BYTES, PAGE_SIZE

from chitu.kv_transfer.sending import PrefillSender
from chitu.kv_transfer.transports.staged import StagedTransport
from chitu.types import Role

KINDS = (
    *["change"] * 2,
    *["ask"] * 6,
    *["run"] * 8,
    *["pass"] * 2,
    *["lose", "double", "delay", "hasten"] * 2,
    *["fault", "land", "cancel"] * 2,
    *("flip", "interrupt"),
    *("again", "kill", "start", "replace", "tell", "freeze", "slow", "deafen", "router"),
)
ROUTED_KINDS = (*KINDS, *["cut", "sever"] * 3, "mute")
"""Commands that also lose token messages, requests and failure reports, which the real router must notice."""
OPS = st.builds(Op, st.sampled_from(KINDS), st.integers(0, 255), st.integers(0, 400))
NETWORK = ("ask", "run", "run", "lose", "double", "delay", "hasten")
NETWORK_OPS = st.builds(Op, st.sampled_from(NETWORK), st.integers(0, 143), st.integers(0, 400))
"""Commands without a lost half: `a` stays below 144."""
SCRIPTS = st.lists(st.lists(OPS, max_size=20), min_size=8, max_size=8)
"""Scripts in pieces, because hypothesis keeps single lists short. About 40 commands; shrinks to few."""
ROUTED_OPS = st.builds(Op, st.sampled_from(ROUTED_KINDS), st.integers(0, 255), st.integers(0, 400))
ROUTED_SCRIPTS = st.lists(st.lists(ROUTED_OPS, max_size=20), min_size=8, max_size=8)
CUT_OPS = st.builds(Op, st.sampled_from([*NETWORK, "cut"]), st.integers(0, 143), st.integers(0, 400))
SEVER = (*NETWORK, "sever", "cancel", "slow")
SEVER_OPS = st.builds(Op, st.sampled_from(SEVER), st.integers(0, 143), st.integers(0, 400))
SHAPES = st.sampled_from([(2, 2), (1, 1), (1, 2), (3, 1)])
BATCH_BYTES = st.sampled_from([1, 4 * PAGE_BYTES, 1 << 20])
VERIFY = st.sampled_from(["off", "sample", "all"])
DIRECT = st.builds(Writes, BATCH_BYTES, VERIFY, has_state=st.booleans())
SEGMENT_BYTES = st.sampled_from([AUX_ROW_BYTES, 5 * 2 * PAGE_BYTES, 1 << 12])
WAYS = st.sampled_from(["staged", "auto"])
STAGED = st.builds(Writes, BATCH_BYTES, VERIFY, WAYS, SEGMENT_BYTES, st.booleans(), st.booleans())
MANY = settings(suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("writes", [DIRECT, STAGED], ids=["direct", "staged"])
@MANY
@given(SHAPES, SCRIPTS, st.data())
def test_any_script_of_faults_costs_requests_at_most_and_never_a_page_a_byte_or_an_answer(
    writes: st.SearchStrategy[Writes], shape: tuple[int, int], pieces: list[list[Op]], data: st.DataObject
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = ClusterWorld(*shape, data.draw(writes))
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()


def test_in_such_scripts_much_of_what_is_asked_for_is_on_d_already() -> None:
    hits = 0
    for seed in range(6):
        rng = random.Random(seed)
        kinds = [rng.choice([*NETWORK, "cancel"]) for _ in range(60)]
        world = ClusterWorld(1, 1)
        world.play([Op(kind, rng.randrange(144), rng.randrange(401)) for kind in kinds])
        world.settle_down()
        hits += sum(process.cache.hit_tokens for process in world.of(Role.DECODE))
    assert hits >= 6 * PAGE_SIZE


@MANY
@given(
    st.lists(
        st.builds(Op, st.sampled_from(["ask", "run", "run"]), st.integers(0, 15), st.integers(0, 400)), max_size=40
    ),
    DIRECT | STAGED,
)
def test_without_faults_every_request_finishes(script: list[Op], writes: Writes) -> None:
    world = ClusterWorld(writes=writes)
    world.play(script)
    world.settle_down()
    assert {asked.end for asked in world.requests.values()} <= {"finished"}
    if writes.way == "staged":
        for process in world.of(Role.PREFILL):
            assert isinstance(process.transport, StagedTransport) and isinstance(process.kv.side, PrefillSender)
            assert process.transport.bytes_staged == process.kv.side.machine.bytes_moved


@MANY
@given(st.lists(st.lists(NETWORK_OPS, max_size=20), min_size=6, max_size=6), DIRECT | STAGED)
def test_a_network_that_loses_doubles_delays_and_reorders_costs_time_and_no_request(
    pieces: list[list[Op]], writes: Writes
) -> None:
    world = ClusterWorld(writes=writes)
    world.play([op for piece in pieces for op in piece])
    world.settle_down()
    assert {asked.end for asked in world.requests.values()} <= {"finished"}


@MANY
@given(st.sampled_from([(2, 2), (1, 2), (3, 1)]), ROUTED_SCRIPTS, st.booleans())
@example((1, 2), [[Op("change", 71), Op("ask", 255, 43), Op("run", 5), Op("freeze"), Op("pass", 3)]], True)
@example((1, 2), [[Op("ask", 255, 43), Op("run", 5), Op("freeze"), Op("pass", 2)]], True)
@example((1, 2), [[Op("kill", 27), Op("run", 4), Op("start"), Op("kill", 16), Op("run", 3)]], False)
@example(
    (1, 2),
    [[Op("change", 71), Op("ask", 255, 43), Op("run", 5), Op("change"), Op("fault"), Op("run"), Op("pass", 3)]],
    True,
)
def test_with_the_real_router_each_client_gets_each_token_once_and_one_end(
    shape: tuple[int, int], pieces: list[list[Op]], has_state: bool
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = RoutedWorld(*shape, Writes(has_state=has_state))
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()


@MANY
@given(st.lists(st.tuples(st.lists(NETWORK_OPS, max_size=20), st.integers(0, 1)), min_size=2, max_size=4))
def test_where_a_pair_survives_crashes_of_the_other_cost_no_request(rounds: list[tuple[list[Op], int]]) -> None:
    world = RoutedWorld()
    script = [op for ops, role in rounds for op in (*ops, Op("crash", role))]
    note(f"script = {script}")
    world.play(script[:-1])
    world.settle_down()
    assert {client.end for client in world.clients} <= {"finished"}


@MANY
@given(st.sampled_from([(2, 2), (1, 1)]), st.lists(st.lists(CUT_OPS, max_size=20), min_size=4, max_size=4))
def test_lost_token_messages_cost_no_token_and_no_attempt(shape: tuple[int, int], pieces: list[list[Op]]) -> None:
    script = [op for ops in pieces for op in ops]
    note(f"script = {script}")
    world = RoutedWorld(*shape)
    world.play(script)
    world.settle_down()
    ends = {client.end for client in world.clients}
    assert ends <= {"finished", "tokens_lost"}
    is_often = sum(op.kind == "cut" for op in script) >= 4
    assert is_often or ends <= {"finished"}
    assert is_often or world.router is None or "tokens_lost" not in world.router.metrics().retries


@MANY
@given(st.sampled_from([(2, 2), (1, 1)]), st.lists(st.lists(SEVER_OPS, max_size=20), min_size=4, max_size=4))
@example((1, 1), [[Op("sever", 0, 1), Op("ask", 12, 0), Op("ask", 12, 0)]])
def test_lost_requests_cost_two_heartbeats_each_and_no_attempt(shape: tuple[int, int], pieces: list[list[Op]]) -> None:
    script = [op for ops in pieces for op in ops]
    note(f"script = {script}")
    world = RoutedWorld(*shape)
    world.play(script)
    num_severed = sum(op.kind == "sever" for op in script)
    world.settle_down(3.0)
    ends = {client.end for client in world.clients}
    # A request that waits on a full D behind such a request ends by its own deadline, two heartbeats in this world.
    ends -= {"queue_timeout"} if num_severed else set()
    assert ends <= {"finished", "cancelled", "request_lost"}
    assert num_severed >= 4 or ends <= {"finished", "cancelled"}
    assert num_severed >= 4 or world.router is None or "request_lost" not in world.router.metrics().retries


# -------------------------------------------------------------------------------------------------------- slow machines


SLOW_S = 120.0
"""Time for the requests of a script to end on slow machines, one after the other."""


@MANY
@given(SHAPES, SCRIPTS, DIRECT | STAGED)
def test_on_slow_machines_any_script_of_faults_costs_requests_at_most(
    shape: tuple[int, int], pieces: list[list[Op]], writes: Writes
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = SlowWorld(*shape, writes)
    world.play(script)
    world.settle_down(SLOW_S)
    asked = world.ask(0, 22, 2)
    world.settle_down(SLOW_S)
    assert asked is not None and asked.end == "finished"


@MANY
@given(st.sampled_from([(2, 2), (1, 2), (3, 1)]), ROUTED_SCRIPTS, st.booleans())
def test_on_slow_machines_with_the_real_router_each_client_gets_each_token_once_and_one_end(
    shape: tuple[int, int], pieces: list[list[Op]], has_state: bool
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = SlowRoutedWorld(*shape, Writes(has_state=has_state))
    world.play(script)
    world.settle_down(SLOW_S)


@MANY
@given(st.lists(st.lists(NETWORK_OPS, max_size=12), min_size=4, max_size=4), DIRECT | STAGED)
def test_slowness_alone_ends_no_transfer_whatever_the_network_loses(pieces: list[list[Op]], writes: Writes) -> None:
    """A slow cluster may have too much to do: then requests end in its queues, or by their own deadline."""
    world = SlowWorld(writes=writes)
    world.play([op for piece in pieces for op in piece])
    world.settle_down(SLOW_S)
    assert {asked.end for asked in world.requests.values()} <= {"finished", "queue_timeout", "request_timeout"}


# ---------------------------------------------------------------------------------------------------- overlapping steps


@MANY
@given(st.sampled_from([(2, 2), (1, 1), (1, 2)]), SCRIPTS, st.booleans())
def test_overlapping_steps_touch_nothing_of_another_room_in_any_script_of_faults(
    shape: tuple[int, int], pieces: list[list[Op]], has_state: bool
) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = LateWorld(*shape, Writes(has_state=has_state))
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()


@MANY
@given(ROUTED_SCRIPTS)
@example([[Op("ask", 22, 33), Op("run", 5), Op("fault"), Op("run", 4), Op("fault"), Op("run"), Op("run", 5)]])
def test_with_overlapping_steps_each_client_gets_each_token_once_and_one_end(pieces: list[list[Op]]) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = LateRoutedWorld(1, 2)
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()


def test_steps_do_overlap_in_these_worlds_and_surplus_rows_are_written() -> None:
    """Without faults every request finishes, and most turns of a busy D leave a step in flight."""
    world = LateWorld(1, 1)
    for number in range(9):
        world.op_ask(0, 7 + 22 * number)
        world.turns(3)
    world.settle_down()
    assert {asked.end for asked in world.requests.values()} == {"finished"}
    for process in world.processes:
        assert isinstance(process, LateProcess) and process.num_overlapped > 10, process.name
