"""The signals that end a launcher, sent to this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from chitu.launch.display import SIGNALS, stop_on_signals


@pytest.fixture(autouse=True)
def _unharmed() -> Iterator[None]:
    """Ignore the signals before and after a test, so that a wrong handler does not end the tests."""
    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_for_the_end_and_ctrl_c_then_ends_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert (ended.value.code, signal.getsignal(number)) == (128 + signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_slurm_or_a_terminal_sends_twice_lets_running_requests_finish(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.is_set()


def test_a_signal_that_the_launcher_ignores_stays_ignored() -> None:
    with stop_on_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_nohup_outlives_the_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.timeout(20)
def test_a_signal_at_any_line_of_the_wait_ends_it() -> None:
    """An Event's `set` in the handler would hang where `wait` holds its lock."""

    def wait_with_a_signal_at(number: int) -> int:
        """Raise SIGTERM before this line of `wait` (0: none). Return how many lines ran."""
        count = 0

        def trace(_frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal count
            count += event == "line"
            if event == "line" and count == number:
                signal.raise_signal(signal.SIGTERM)
            return trace

        with stop_on_signals() as stop:
            sys.settrace(trace)
            try:
                stop.wait(0.01)
            finally:
                sys.settrace(None)
            assert stop.is_set() == (number > 0)
        return count

    for number in range(1, wait_with_a_signal_at(0) + 1):
        wait_with_a_signal_at(number)
