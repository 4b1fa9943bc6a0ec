"""The scripts of faults again, on P and D whose steps overlap: no other room owns what a launched step may touch,
whatever dies, is cancelled or is repeated meanwhile. `CHITU_PROTOCOL_CASES` as in `test_cluster_faults.py`."""

from __future__ import annotations

from cluster_script import Op
from hypothesis import given, note, settings
from hypothesis import strategies as st
from late_process import LateProcess, LateRoutedWorld, LateWorld
from test_cluster_faults import CASES, MANY, ROUTED_SCRIPTS, SCRIPTS


@settings(MANY, max_examples=max(1, CASES // 4))
@given(st.sampled_from([(2, 2), (1, 1), (1, 2)]), SCRIPTS)
def test_any_script_of_faults_costs_requests_at_most(shape: tuple[int, int], pieces: list[list[Op]]) -> None:
    script = [op for piece in pieces for op in piece]
    note(f"script = {script}")
    world = LateWorld(*shape)
    world.play(script)
    world.settle_down()
    world.check_it_still_serves()


@settings(MANY, max_examples=max(1, CASES // 14))
@given(ROUTED_SCRIPTS)
def test_with_the_real_router_each_client_gets_each_token_once_and_one_end(pieces: list[list[Op]]) -> None:
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
