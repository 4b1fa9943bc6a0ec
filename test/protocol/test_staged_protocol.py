"""Staged transfers under a hostile network: late writes hit segments, never pages, and every segment comes back.

The worlds are those of `test_transfer_protocol.py`; what is looked at besides: nothing but segments is ever written
(`World._check_landing`), free pages keep their poison though they are given back without P's word, and in the end every
segment of every D is free again.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pd_node import Node
from pd_world import World

from chitu.kv_transfer.events import TransferEventKind as Kind
from chitu.kv_transfer.staging.area import TransferWay
from chitu.types import Role

SEEDS = st.integers(0, 2**32)
WAYS = st.sampled_from(["staged", "auto"])


def abort_meanwhile(world: World) -> None:
    """Now and then a request ends while its bytes are being gathered or scattered."""

    def watch(node: Node) -> None:
        def meanwhile() -> None:
            if node.requests and world.rng.random() < world.hostility / 2:
                node.abort(world.rng.choice(list(node.requests)))
                if node.role is Role.DECODE:  # P's step thread is inside a step and polls behind it
                    node.poll()

        node.copier.meanwhile = meanwhile

    for node in world.nodes:
        watch(node)


MANY = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@given(SEEDS, WAYS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_on_a_good_network_every_staged_request_succeeds_with_the_right_bytes(seed: int, way: TransferWay) -> None:
    world = World(seed, num_prefill=1 + seed % 2, num_decode=1 + seed // 2 % 2, way=way)
    world.publish_view()
    for _ in range(3):
        world.submit()
        world.churn(4)
        for node in world.of(Role.PREFILL):
            node.compute()
        world.advance(0.05)
    world.settle_down()
    world.check_all_returned()
    rooms = [request for node in world.nodes for request in node.requests.values()]
    assert rooms
    for request in rooms:
        assert request.seen[-1] is Kind.SUCCESS
    if way == "staged":
        assert all(node.sender.bytes_staged == node.sender.bytes_moved for node in world.of(Role.PREFILL))


@given(SEEDS, WAYS)
@MANY
def test_lost_doubled_and_reordered_groups_and_answers_cost_requests_but_never_bytes_or_pages(
    seed: int, way: TransferWay
) -> None:
    world = World(seed, num_prefill=1, num_decode=1 + seed % 2, hostility=0.3, way=way)
    abort_meanwhile(world)
    world.publish_view()
    rng = world.rng
    for _ in range(25):
        choice = rng.random()
        if choice < 0.2:
            world.submit()
        elif choice < 0.5:
            for node in world.of(Role.PREFILL):
                node.compute()
        elif choice < 0.6:
            node = rng.choice(world.nodes)
            if node.requests:
                node.abort(rng.choice(list(node.requests)))
        elif choice < 0.64:
            world.fabric.release_late_writes()
        world.churn(rng.randint(0, 8))
        world.advance(rng.choice([0.0, 0.05, 0.3]))
    world.settle_down()
    world.check_all_returned()


@given(SEEDS, WAYS)
@MANY
def test_processes_that_die_freeze_and_leave_the_view_never_hang_or_corrupt_staged_transfers(
    seed: int, way: TransferWay
) -> None:
    world = World(seed, num_prefill=1 + seed % 2, num_decode=2, hostility=0.15, way=way)
    world.publish_view()
    rng = world.rng
    for _ in range(25):
        choice = rng.random()
        if choice < 0.25:
            world.submit()
        elif choice < 0.5:
            for node in world.of(Role.PREFILL):
                if not node.is_frozen:
                    node.compute()
        elif choice < 0.6:
            world.restart(rng.choice(world.nodes))
            world.publish_view()
        elif choice < 0.7:
            node = rng.choice(world.nodes)
            node.is_frozen = not node.is_frozen
            node.is_in_view = not node.is_frozen or rng.random() < 0.5
            world.publish_view()
        elif choice < 0.75:
            node = rng.choice(world.nodes)
            node.is_in_view = not node.is_in_view
            world.publish_view()
        elif choice < 0.8:
            world.fabric.release_late_writes()
        world.churn(rng.randint(0, 8))
        world.advance(rng.choice([0.0, 0.05, 0.3, 1.0]))
    world.settle_down()
    world.check_all_returned()
