"""The account of a request: whatever router, P and D report, its stages are ordered and add up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chitu.protocol.account import (
    ATTEMPT_STAGES,
    REPORTED_STAGES,
    STAGES,
    Moments,
    PrefillTimes,
    RequestSnapshot,
    Stages,
    StageTimes,
    attempt_stages,
    laid_out,
    request_stages,
)

NEAR_S = st.integers(-1, 30).map(lambda number: number / 3e6)
"""Parts of a microsecond, few enough that any two often meet."""
CLOCK_S = NEAR_S | st.floats(-1e5, 1e5)
SPAN_S = NEAR_S | st.floats(-1.0, 1e4)
REPORTED_S = SPAN_S | st.floats()
TIMES = st.builds(PrefillTimes, REPORTED_S, REPORTED_S, REPORTED_S) | st.just(PrefillTimes())
REPORTS = st.none() | st.builds(StageTimes, TIMES, REPORTED_S, REPORTED_S, REPORTED_S, REPORTED_S)


def us(span_s: float) -> int:
    return round(1e6 * span_s)


def spans_us(stages: Stages) -> list[int]:
    return [us(span_s) for _, span_s in stages.known()]


def record(created_s: float, first_s: float | None, ended_s: float | None, stages: Stages | None) -> RequestSnapshot:
    return RequestSnapshot("room", "id", "P0", "D0", "finished", 9, 5, created_s, first_s, ended_s, 0, stages, "")


@st.composite
def attempts(draw: Callable[..., float], number: int) -> list[RequestSnapshot]:
    """Return attempts of one choice, with or without D's report; the last may still run."""
    made = []
    for i in range(number):
        created_s, first_s, ended_s = draw(CLOCK_S), draw(st.none() | CLOCK_S), draw(CLOCK_S)
        stages = attempt_stages(created_s, first_s, ended_s, draw(REPORTS), is_pair=draw(st.booleans()))
        runs = i == number - 1 and draw(st.booleans())
        made.append(record(created_s, first_s, None if runs else ended_s, None if runs else stages))
    return made


@given(CLOCK_S, st.none() | CLOCK_S, CLOCK_S, REPORTS, st.booleans(), st.booleans())
def test_the_stages_of_an_attempt_add_up(
    created_s: float, first_s: float | None, ended_s: float, report: StageTimes | None, is_pair: bool, is_early: bool
) -> None:
    is_early &= is_pair
    stages = attempt_stages(created_s, first_s, ended_s, report, is_pair=is_pair, is_early=is_early)
    assert min(spans_us(stages)) >= 0
    assert sum(spans_us(stages)) == us(record(created_s, first_s, ended_s, stages).total_s or 0.0)
    assert sum(spans_us(stages)) == max(0, us(ended_s) - us(created_s))
    names = [name for name, _ in stages.known()]
    unknown = (*(() if is_pair else ("admission", "transfer")), "first_step" if is_early else "confirm")
    assert names == (
        ["prefill", "decode"] if report is None else [name for name in REPORTED_STAGES if name not in unknown]
    )
    assert stages.is_reported == (report is not None)


@given(st.data(), CLOCK_S, CLOCK_S, CLOCK_S, st.integers(0, 4), st.integers(1, 3))
def test_the_stages_of_every_choice_add_up_to_the_request(
    data: st.DataObject, arrived_s: float, received_s: float, answered_s: float, number: int, choices: int
) -> None:
    moments = Moments(arrived_s, received_s, answered_s)
    for _ in range(choices):
        stages = request_stages(moments, data.draw(attempts(number)))
        assert min(spans_us(stages)) >= 0
        assert sum(spans_us(stages)) == us(moments.total_s) == max(0, us(answered_s) - us(arrived_s))
        names = [name for name, _ in stages.known()]
        assert names == sorted(names, key=STAGES.index) and (names[0], names[-1]) == ("receive", "answer")
        spans = list(laid_out(stages, arrived_s))
        assert [name for name, *_ in spans] == names
        assert all(before[2] == after[1] for before, after in pairwise(spans))
        assert us(spans[-1][2]) == max(us(arrived_s), us(answered_s))
        assert msgspec.json.decode(msgspec.json.encode(stages), type=Stages) == stages


@given(st.lists(st.floats(0, 1e3), min_size=5, max_size=5), REPORTS)
def test_moments_in_order_give_the_request_the_stages_of_its_last_attempt(
    widths: list[float], report: StageTimes | None
) -> None:
    at_s = [sum(widths[: i + 1]) for i in range(5)]
    received_s, first_created_s, created_s, ended_s, answered_s = at_s
    last = attempt_stages(created_s, created_s, ended_s, report, is_pair=True)
    failed = record(first_created_s, None, created_s, None)
    stages = request_stages(Moments(0.0, received_s, answered_s), [failed, record(created_s, created_s, ended_s, last)])
    assert [stages.span_s(name) for name in ATTEMPT_STAGES] == [last.span_s(name) for name in ATTEMPT_STAGES]
    assert (us(stages.span_s("retry") or 0.0), us(stages.span_s("prepare") or 0.0)) == (
        us(created_s) - us(first_created_s),
        us(first_created_s) - us(received_s),
    )


def stages_ms(times: PrefillTimes, *of_d: float, is_pair: bool = True) -> dict[str, int]:
    """Return the stages, in ms, of an attempt that took a second at the router."""
    stages = attempt_stages(5.0, 5.25, 6.0, StageTimes(times, *of_d), is_pair=is_pair)
    return {name: round(1e3 * span_s) for name, span_s in stages.known()}


def test_the_queue_of_p_begins_when_d_has_announced() -> None:
    """What both waited for counts once, for D: more P would not shorten it."""
    assert stages_ms(PrefillTimes(0.05, 0.1, 0.02), 0.03, 0.2, 0.17, 0.99) == {
        **{"admission": 30, "queue": 20, "compute": 100, "transfer": 20, "first_step": 30},
        **{"decode": 790, "messages": 10},
    }


@pytest.mark.parametrize(("announced_s", "admission"), [(0.01, 10), (0.12, 20), (0.15, 50)])
def test_what_p_computes_before_the_announcement_is_no_wait(announced_s: float, admission: int) -> None:
    """P begins after 20 ms, or 10 ms after the announcement, and computes for 100 ms."""
    stages = stages_ms(PrefillTimes(0.02, 0.1, 0.08), announced_s, 0.2, 0.2, 0.9)
    assert (stages["admission"], stages["queue"], stages["compute"]) == (admission, max(0, 20 - admission), 100)
    assert stages["transfer"] == 200 - sum(stages[name] for name in ("admission", "queue", "compute"))


def test_kv_that_comes_after_token_1_is_transfer_until_it_is_there() -> None:
    stages = stages_ms(PrefillTimes(0.0, 0.1, 0.4), 0.0, 0.2, 0.55, 1.0)
    assert (stages["transfer"], stages["first_step"], stages["decode"]) == (450, 0, 450)


def test_a_unified_instance_has_neither_admission_nor_transfer() -> None:
    assert stages_ms(PrefillTimes(0.05, 0.1), 0.0, 0.15, 0.0, 0.9, is_pair=False) == {
        **{"queue": 50, "compute": 100, "first_step": 0, "decode": 750, "messages": 100}
    }


@given(SPAN_S, SPAN_S, SPAN_S)
def test_times_between_moments_give_the_moments_again(queue_s: float, compute_s: float, transfer_s: float) -> None:
    assume(min(queue_s, compute_s, transfer_s) >= 0)
    times = PrefillTimes.of(3.0, *PrefillTimes(queue_s, compute_s, transfer_s).moments(3.0))
    assert msgspec.structs.astuple(times) == pytest.approx((queue_s, compute_s, transfer_s), abs=1e-6)


def test_rates_and_first_tokens_are_those_of_the_attempt() -> None:
    """Two of five tokens were those of an attempt before."""
    stages = attempt_stages(1.0, 1.5, 3.5, None, is_pair=True)
    made = msgspec.structs.replace(record(1.0, 1.5, 3.5, stages), continued_tokens=2)
    assert (made.first_token_s, made.total_s, made.tokens_per_s) == (0.5, 2.5, 1.0)
    running = record(1.0, None, None, None)
    assert (running.first_token_s, running.total_s, running.tokens_per_s) == (None, None, None)
    assert list(running.stages_at(1.25).known()) == [("prefill", 0.25), ("decode", 0.0)]
