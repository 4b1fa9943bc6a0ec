"""Requests are numbered: an instance says how far it has read and what never came, and means it."""

from __future__ import annotations

import pytest

from chitu.instance.received_requests import MAX_GAPS, MAX_LINKS, ReceivedRequests
from chitu.protocol import RequestsReceived

LINK, OTHER = 70, 71


def taken(received: ReceivedRequests, *numbers: int, link: int = LINK) -> list[int]:
    """Those that may be acted upon."""
    return [number for number in numbers if received.take(link, number)]


@pytest.mark.parametrize(
    ("numbers", "last", "missing"),
    [
        ([1, 2, 3], 3, ()),
        ([3], 3, ((1, 2),)),
        ([1, 3], 3, ((2, 2),)),
        ([1, 4, 8], 8, ((2, 3), (5, 7))),
        ([1, 5, 3], 5, ((2, 2), (4, 4))),
        ([1, 5, 2, 4, 3], 5, ()),
        ([1, 5, 4], 5, ((2, 3),)),
        ([2, 1], 2, ()),
    ],
)
def test_the_report_has_the_highest_number_and_the_gaps_below_it(
    numbers: list[int], last: int, missing: tuple[tuple[int, int], ...]
) -> None:
    """What comes late, but before it was reported, is taken: the tail of one connection behind the head of the next."""
    received = ReceivedRequests()
    assert taken(received, *numbers) == numbers
    assert received.report() == (RequestsReceived(LINK, last, missing),)


def test_what_was_reported_missing_is_never_taken_and_nothing_is_taken_twice() -> None:
    received = ReceivedRequests()
    assert taken(received, 1, 4, 4, 1) == [1, 4]
    received.report()
    assert taken(received, 2, 7, 3, 5, 7) == [7, 5]
    assert received.report() == (RequestsReceived(LINK, 7, ((2, 3), (6, 6))),)
    assert taken(received, 6) == []


def test_a_link_is_reported_where_something_came_and_its_gaps_again_each_time() -> None:
    received = ReceivedRequests()
    assert received.report() == ()
    taken(received, 1, 3)
    taken(received, 1, link=OTHER)
    assert [said.link for said in received.report()] == [LINK, OTHER]
    assert received.report() == ()
    taken(received, 4)
    assert received.report() == (RequestsReceived(LINK, 4, ((2, 2),)),)


def test_an_alarm_is_raised_once_for_each_new_gap_and_for_nothing_else() -> None:
    received = ReceivedRequests()
    alarms = []
    for number in (1, 2, 4, 5, 3, 9, 9):
        received.take(LINK, number)
        alarms.append(received.take_alarm())
    assert alarms == [False, False, True, False, False, True, False]


def test_messages_without_a_number_are_taken_and_not_counted() -> None:
    received = ReceivedRequests()
    assert taken(received, 0, 0, -1) == [0, 0, -1]
    assert received.report() == ()


def test_memory_is_bounded_whoever_writes_to_the_port() -> None:
    received = ReceivedRequests()
    for link in range(MAX_LINKS + 10):
        received.take(link, 5)
    assert [said.link for said in received.report()] == list(range(10, MAX_LINKS + 10))
    received = ReceivedRequests()
    for number in range(2, 4 * MAX_GAPS, 2):
        received.take(LINK, number)
    (said,) = received.report()
    assert len(said.missing) == MAX_GAPS and said.missing[-1] == (4 * MAX_GAPS - 3,) * 2
    assert taken(received, 1, 4 * MAX_GAPS - 3) == []
    assert taken(received, (1 << 64) - 1) == [(1 << 64) - 1]
