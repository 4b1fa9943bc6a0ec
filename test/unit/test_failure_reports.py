"""P reports a failure at once and with its next heartbeats, since the router does not acknowledge the report."""

from __future__ import annotations

from chitu.instance.requests import KEPT, REPEATS, FailureReports
from chitu.protocol import RequestFailed
from chitu.types import Role


def failed(number: int) -> RequestFailed:
    return RequestFailed(Role.PREFILL, 0, 7, number.to_bytes(16, "little"), "capacity", "for a test")


def test_a_failure_is_told_at_once_and_with_each_of_the_next_heartbeats() -> None:
    told: list[RequestFailed] = []
    reports = FailureReports(told.append)
    reports.add(failed(1))
    assert told == [failed(1)]
    assert reports.repeats() == [failed(1)]
    reports.add(failed(2))
    rest = [reports.repeats() for _ in range(REPEATS + 1)]
    assert rest == [[failed(1), failed(2)]] * (REPEATS - 1) + [[failed(2)], []]


def test_a_flood_of_failures_is_told_once_and_takes_no_more_memory() -> None:
    told: list[RequestFailed] = []
    reports = FailureReports(told.append)
    for number in range(KEPT + 5):
        reports.add(failed(number))
    assert len(told) == KEPT + 5
    assert reports.repeats() == [failed(number) for number in range(5, KEPT + 5)]
