"""The two machines and the pairs of ends that the tests of a file share, and the table of what they saw."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pairs import RIDES, WAYS, Nursery, Pair, compile_retry_limit
from virtual_machines import Machine, VirtualMachines, missing


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RIDES] = []


@pytest.fixture(scope="session")
def is_possible() -> None:
    """Skip the tests if there can be no machines. In CI that is a failure."""
    if absent := missing():
        text = f"no virtual machines here, missing: {', '.join(absent)} (script/setup.sh --dev fetches it where it can)"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, is_possible: None) -> Iterator[tuple[Machine, Machine]]:
    """Boot the machines: the first is D's, the second P's."""
    with VirtualMachines(tmp_path_factory.mktemp("machines")) as machines:
        yield machines


@pytest.fixture(scope="module")
def nurseries(machines: tuple[Machine, Machine], tmp_path_factory: pytest.TempPathFactory) -> list[Nursery]:
    library = compile_retry_limit(tmp_path_factory.mktemp("retry_limit"))
    return [Nursery(machine, library) for machine in machines]


@pytest.fixture(scope="module")
def pairs(nurseries: list[Nursery]) -> list[Pair]:
    """Start and connect a pair for each way."""
    pairs = [Pair(way, *nurseries) for way in WAYS]
    for pair in pairs:
        pair.connect()
    return pairs


@pytest.fixture(autouse=True)
def stories(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print what the machines and the ends said if a test fails."""
    yield
    if getattr(request.node, "rep_failed", False):
        for name in {"machines", "pairs"} & set(request.fixturenames):
            for one in request.getfixturevalue(name):
                print(one.story())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.rep_failed = report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not (rows := config.stash[RIDES]):
        return
    ways = [way.name for way in WAYS]
    terminalreporter.section("RDMA between two virtual machines: faults and what became of pages")
    terminalreporter.write_line(f"| fault | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
    for fault, rides in rows:
        cells = {ride.way: ride.cell() for ride in rides}
        terminalreporter.write_line(f"| {fault} | {' | '.join(cells.get(way, '') for way in ways)} |")
