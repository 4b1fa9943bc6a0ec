"""The connection from the router to one P or D breaks under load, and nothing else does. Every request is right, and
what was in flight is sent again within two heartbeats and costs no attempt. The times are printed. What follows where
nothing gets through is in `test/protocol/test_fleet.py`."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator

import pytest
from chaos_cluster import DEADLINES, PATIENCE_S, ChaosCluster, short_ask
from support.router_process import wait_until

pytestmark = pytest.mark.timeout(120)
INTERVAL_S, LEASE_S = 0.5, 3.0
DEFAULTS = (
    *(f"{DEADLINES}.bootstrap_s=10", f"{DEADLINES}.queue_s=30", f"{DEADLINES}.transfer_s=30"),
    *(f"{DEADLINES}.lease_s={LEASE_S}", f"{DEADLINES}.heartbeat_interval_s={INTERVAL_S}"),
    f"{DEADLINES}.retry_interval_s=0.5",
)
"""The product's default deadlines, not the short ones of the other chaos tests."""
LONGEST_S = 15.0
"""Bound on a request. A lease, a heartbeat and the request take less than 5; the rest is for busy machines. The next
deadline is 73."""
FROZEN_S = 0.4
LINKS = ("router>D0", "router>P0", "D0>P0", "P0>D0")
AGAIN = re.compile(r"messages to (\w+) were lost or are late: (\d+) are sent again")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with ChaosCluster(tmp_path_factory.mktemp("links"), *DEFAULTS, clients=6) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def load(cluster: ChaosCluster) -> Iterator[None]:
    wait_until(lambda: not cluster.not_whole(), 20, cluster.not_whole)
    cluster.load.take_answers()
    cluster.load.resume()
    yield
    for link in LINKS:  # left cut by a failed test
        cluster.wires.heal(link)
    cluster.load.pause(PATIENCE_S)


def found(cluster: ChaosCluster, what: re.Pattern[str], name: str) -> list[float]:
    """Return the number in each matching line of the router's log so far, for this instance."""
    return [float(seconds) for who, seconds in what.findall(cluster.processes.logs("router")) if who == name]


def send(cluster: ChaosCluster, count: int) -> None:
    """Send more requests at once than there are clients; half of them for each P and D."""
    cluster.load.send([short_ask(random.Random(n)) for n in range(count)])


def finish(cluster: ChaosCluster, what: str, seconds: list[float]) -> None:
    """Check that everything ended, right and in time, and left nothing behind."""
    cluster.load.pause(PATIENCE_S)
    answers = cluster.load.take_answers()
    longest_s = max(answer.ended_s - answer.started_s for answer in answers)
    print(
        f"\n{what}: {len(answers)} requests, {len(seconds)} of them moved after {min(seconds, default=0):.2f} to "
        f"{max(seconds, default=0):.2f} s; the longest answer took {longest_s:.2f} s"
    )
    assert {answer.outcome for answer in answers} == {"right"}, [a for a in answers if a.outcome != "right"]
    assert longest_s < LONGEST_S
    wait_until(lambda: not cluster.not_whole(), 10, cluster.not_whole)


@pytest.mark.parametrize("name", ["D0", pytest.param("P0", marks=pytest.mark.by_hand)])
def test_what_a_cut_takes_on_its_way_comes_again(cluster: ChaosCluster, name: str) -> None:
    link = f"router>{name}"
    before, lost = len(found(cluster, AGAIN, name)), cluster.processes.logs("router").count("request_lost")
    wait_until(lambda: cluster.wires.connections_of(link) == 1, 5, lambda: f"no connection {link}")
    cluster.wires.freeze(link)
    send(cluster, 12)
    threading.Event().wait(FROZEN_S)
    cluster.wires.cut(link)
    cluster.wires.heal(link)
    wait_until(lambda: len(found(cluster, AGAIN, name)) > before, 10, "nothing was sent again")
    finish(cluster, f"{link} broke, {len(found(cluster, AGAIN, name)) - before} times sent again", [])
    assert cluster.processes.logs("router").count("request_lost") == lost


SILENCE_S = 6.0


def served_by(cluster: ChaosCluster, pair: tuple[str, str], since_s: float) -> int:
    """Return the number of requests of that pair that began since then (by the router's clock) and finished."""
    ended = [r for r in cluster.snapshot().requests if r.state == "finished" and r.created_at_s >= since_s]
    return sum((request.prefill, request.decode) == pair for request in ended)


def answered_within(cluster: ChaosCluster, seconds: float) -> int:
    """Return the number of right answers that arrive in that time."""
    cluster.load.take_answers()
    threading.Event().wait(seconds)
    return sum(answer.outcome == "right" for answer in cluster.load.take_answers())


@pytest.mark.by_hand
def test_a_pair_that_does_not_hear_each_other_is_left_out_and_the_others_serve_on(cluster: ChaosCluster) -> None:
    """Both instances live, reach the router, and serve with other partners. The deadline of such a wait is 10 s."""
    links = LINKS[2:]
    for link in links:
        wait_until(lambda link=link: cluster.wires.connections_of(link) == 1, 5, lambda link=link: f"no {link}")  # type: ignore[misc]
    before = answered_within(cluster, SILENCE_S)
    for link in links:
        cluster.wires.freeze(link)
    during = answered_within(cluster, SILENCE_S)
    cluster.load.pause(PATIENCE_S)
    answers = cluster.load.take_answers()
    for link in links:
        cluster.wires.heal(link)
    moved = cluster.processes.logs("router").count("(bootstrap_timeout: D0 receives nothing from P0)")
    longest_s = max((answer.ended_s - answer.started_s for answer in answers), default=0.0)
    print(
        f"\nP0-D0 silent: {before} answers in {SILENCE_S:g} s before, {during} during, {moved} moved, the last answers "
        f"took up to {longest_s:.2f} s"
    )
    assert {answer.outcome for answer in answers} <= {"right"} and moved
    assert during > before / 3, "the other three pairs serve as before"
    wait_until(lambda: not cluster.not_whole(), 10, cluster.not_whole)
    healed_s = cluster.snapshot().time_s
    cluster.load.resume()
    wait_until(lambda: served_by(cluster, ("P0", "D0"), healed_s) > 0, 10, "P0-D0 is still left out")
    cluster.load.pause(PATIENCE_S)
    assert {answer.outcome for answer in cluster.load.take_answers()} == {"right"}
