"""chitu's transport over RDMA, between two virtual machines with soft-RoCE, and faults of network and hosts.

Over three ways at a time: TCP; RDMA with soft-RoCE's endless retry, so late writes complete; and RDMA that gives up
after some retries, as adapters do, so writes fail. After each fault pages that were quarantined have another owner, and
no late write may reach them. The tests run in this order, on the same pairs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from pairs import ENDLESS, HEAL_S, NUM_PAGES, RIDES, End, Nursery, Pair, Refused, Ride, Way
from support.router_process import wait_until
from virtual_machines import Machine

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

LATE_S = 3.0
"""Time in which a late write would land that a fence has not awaited."""
LEASE_S = 3.0
"""Silence after which an instance counts as dead (the product's default)."""
Machines = tuple[Machine, Machine]


def ride(
    pairs: Sequence[Pair],
    begin: Callable[[], None],
    end: Callable[[], None],
    lasts_s: float,
    limits_s: Mapping[Way, float] = {},
    unfenced: Pair | None = None,
) -> list[Ride]:
    """Take all pairs through a fault. `limits_s`: time to heal of some, in place of HEAL_S. `unfenced`: a pair that
    gives pages to another owner without a fence."""
    is_over = threading.Event()
    with ThreadPoolExecutor(len(pairs)) as pool:
        futures = [
            pool.submit(pair.ride, is_over, limits_s.get(pair.way, HEAL_S), pair is not unfenced) for pair in pairs
        ]
        time.sleep(0.5)
        try:
            begin()
            time.sleep(lasts_s)
        finally:
            end()
            is_over.set()
        rides = [future.result() for future in futures]
    time.sleep(LATE_S)
    for pair, one in zip(pairs, rides, strict=True):
        one.reached = pair.reached()
        print(one)
    return rides


def check(request: pytest.FixtureRequest, fault: str, rides: Sequence[Ride]) -> None:
    """Add a row to the table; every pair must have healed, without a wrong byte."""
    request.config.stash[RIDES].append((fault, list(rides)))
    for one in rides:
        assert one.is_right, one
        assert one.heal_s is not None, one


def test_bytes_arrive_over_each_way(pairs: list[Pair]) -> None:
    for pair in pairs:
        seen = Ride(pair.way.name)
        for first in range(0, NUM_PAGES, 16):
            assert pair.write(range(first, first + 16), seen), seen
        assert not seen.num_wrong, seen


@pytest.mark.parametrize("round_trip_ms", [2, 40])
def test_bytes_arrive_over_a_long_way(machines: Machines, pairs: list[Pair], round_trip_ms: int) -> None:
    for machine in machines:
        machine.delay(round_trip_ms / 2)
    try:
        for pair in pairs:
            seen = Ride(pair.way.name)
            assert pair.write(range(8), seen) and pair.write(range(8, 16), seen), seen
            assert not seen.num_wrong, seen
    finally:
        for machine in machines:
            machine.heal()


def test_lost_rdma_with_living_control_messages_heals(
    request: pytest.FixtureRequest, machines: Machines, nurseries: list[Nursery], pairs: list[Pair]
) -> None:
    """The loss lasts longer than the timeout of a write. A pair without a fence rides beside the others: it shows that
    a late write is found."""
    _, p = machines
    unfenced = Pair(ENDLESS, *nurseries)
    unfenced.connect()
    *rides, planted = ride([*pairs, unfenced], lambda: p.lose(100, roce_only=True), p.heal, 15.0, unfenced=unfenced)
    unfenced.end()
    check(request, "RDMA lost for 15 s", rides)
    assert planted.reached, planted


def test_a_flapping_link_heals(
    request: pytest.FixtureRequest, machines: Machines, nurseries: list[Nursery], pairs: list[Pair]
) -> None:
    """A writer that joins just then is not refused. Mooncake destroys D's queue pairs, which soft-RoCE retries for ever
    and no adapter would: that pair stays suspended, rightly, and its writer's successor works."""
    d, _ = machines
    endless, errors = pairs[1:]
    newcomer = End(nurseries[1], errors.way)
    memory = errors.target.offer()
    newcomer.offer()
    answers: list[dict[str, object]] = []

    def join() -> None:
        """Register until it is done, as D does."""
        end_s = time.monotonic() + HEAL_S
        while time.monotonic() < end_s and (not answers or "error" in answers[-1]):
            answers.append(newcomer.ask("connect", memory=memory))

    joining = threading.Thread(target=join)

    def heal() -> None:
        d.set_carrier(True)
        joining.start()

    rides = ride(pairs, lambda: d.set_carrier(False), heal, 6.0, {endless.way: 5.0})
    joining.join()
    newcomer.kill()
    assert answers[-1] == {}, answers
    assert {answer["kind"] for answer in answers[:-1]} <= {"PeerUnreachable"}, answers
    request.config.stash[RIDES].append(("link of D down for 6 s", rides))
    for one in rides:
        assert one.is_right, one
        assert one.heal_s is not None or one.way == endless.way.name, one
    endless.writer.kill()
    endless.replace_writer()
    endless.connect(HEAL_S)
    assert endless.write(range(8))


def test_a_silent_host_heals(request: pytest.FixtureRequest, machines: Machines, pairs: list[Pair]) -> None:
    d, _ = machines
    check(request, "host of D stands still for 8 s", ride(pairs, d.pause, d.resume, 8.0))


def test_a_host_that_may_pin_little_gets_a_sentence(nurseries: list[Nursery]) -> None:
    before = ["prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock"]
    with pytest.raises(Refused) as caught:
        End(nurseries[1], ENDLESS, before).offer()
    assert "cannot register" in str(caught.value) and "ulimit -l" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_removed_device_and_a_writer_killed_inside_a_write(
    machines: Machines, nurseries: list[Nursery], pairs: list[Pair]
) -> None:
    """The device goes when its last process ends. Nothing of a dead writer lands after its lease."""
    _, p = machines
    removal = p.start("rdma", "link", "delete", "rxe0")
    for pair in pairs:
        assert pair.write(range(8)), "a device that is being removed serves who has it"
    for pair in pairs:
        (before,) = pair.target.sums([0])
        pair.writer.tell("write", pages=[*range(NUM_PAGES)] * 8, seed=99, timeout_s=60.0)
        wait_until(lambda: pair.target.sums([0]) != [before], 30.0, "the first page of a write to arrive")  # noqa: B023
        assert not pair.writer.kill(), "the write had ended already"
    removal.wait()
    assert removal.status == 0, removal.errors
    time.sleep(LEASE_S)
    for pair in pairs:
        pair.take_over(range(NUM_PAGES))
    with pytest.raises(Refused) as caught:
        End(nurseries[1], ENDLESS).offer()
    assert "device" in str(caught.value) and "Traceback" not in str(caught.value)
    for pair in pairs:
        assert not pair.reached(), pair.way
    p.run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "data0")
    for pair in pairs:
        pair.replace_writer()
    for pair in pairs:
        pair.connect(HEAL_S)
        assert pair.write(range(8))
