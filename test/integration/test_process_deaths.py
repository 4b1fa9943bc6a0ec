"""A death on the router's own machine is known at once, long before a lease ends; a pid of another machine means
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from nursery import forked_router
from support.router_process import wait_until

from chitu.net.process_deaths import ProcessDeaths, ProcessName, pid_namespace, start_ticks
from chitu.tools.make_model import make_model

PATIENCE_S = 20.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def name_of(child: subprocess.Popen[bytes]) -> ProcessName:
    return ProcessName(pid_namespace(), child.pid, start_ticks(child.pid))


def test_a_follower_dies_with_its_main_rank_even_if_it_is_stopped() -> None:
    imports = "import os; from chitu.engine.process_watch import Lifeline, open_lifelines;"
    pipe = subprocess.PIPE

    def process(script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", imports + script, *arguments], stdin=pipe, stdout=pipe, text=True
        )

    with process("print(*open_lifelines(3), flush=True); input()") as main:
        assert main.stdout is not None
        ends = main.stdout.readline().split()
        follow = "import sys; line = Lifeline(*map(int, sys.argv[1:])); print('follows', flush=True); input();"
        follow += "line.close(); print('closed', flush=True); input()"
        followers = [process(follow, str(main.pid), end) for end in ends]
        for follower in followers:
            assert follower.stdout is not None and follower.stdin is not None
            assert follower.stdout.readline() == "follows\n"
        _, stopped, closed = followers
        stopped.send_signal(signal.SIGSTOP)
        print(file=closed.stdin, flush=True)
        assert closed.stdout is not None and closed.stdout.readline() == "closed\n"
        main.kill()
    assert [follower.wait(PATIENCE_S) for follower in followers[:2]] == [-signal.SIGKILL] * 2
    closed.communicate("\n", PATIENCE_S)
    assert closed.returncode == 0, "it has closed its lifeline and ends by itself"


Act = Callable[[ProcessDeaths[str]], None]


def deaths_of(processes: Mapping[str, ProcessName], act: Act, wait_for: int) -> list[str]:
    """Return the reported deaths once there are `wait_for` (0: at once) after `act`."""

    async def run() -> list[str]:
        reported: list[str] = []
        enough = asyncio.Event()

        def on_death(key: str) -> None:
            reported.append(key)
            if len(reported) >= wait_for:
                enough.set()

        deaths = ProcessDeaths(asyncio.get_running_loop(), on_death)
        for key, name in processes.items():
            deaths.follow(key, name)
        act(deaths)
        if wait_for:
            await asyncio.wait_for(enough.wait(), PATIENCE_S)
        for _ in range(20):  # pending reports would arrive now
            await asyncio.sleep(0)
        deaths.close()
        return reported

    return asyncio.run(run())


def pidfds() -> list[str]:
    """Return the open pidfds; the caller disregards those that earlier tests of this process left open."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return [link for link in links if "pidfd" in link]


def test_a_process_that_is_killed_is_reported_once_and_only_while_it_is_followed(
    child: subprocess.Popen[bytes],
) -> None:
    name, before = name_of(child), pidfds()
    assert deaths_of({"a": name}, lambda deaths: None, wait_for=0) == []

    def forget_and_kill(deaths: ProcessDeaths[str]) -> None:
        deaths.forget("a")
        deaths.follow("a", name)
        deaths.follow("b", name)
        deaths.forget("a")
        child.kill()

    assert deaths_of({"a": name}, forget_and_kill, wait_for=1) == ["b"]
    assert pidfds() == before
    child.wait()
    assert deaths_of({"a": name}, lambda deaths: deaths.follow("a", name), wait_for=1) == ["a"], "dead from the start"


def test_a_pid_that_another_process_has_by_now_is_a_death_and_one_of_elsewhere_tells_nothing(
    child: subprocess.Popen[bytes],
) -> None:
    name = name_of(child)
    used_again = name._replace(start_ticks=name.start_ticks - 1)
    assert deaths_of({"a": used_again}, lambda deaths: None, wait_for=1) == ["a"]
    elsewhere = {"a": name._replace(pid_namespace="another machine"), "b": name._replace(pid_namespace="")}

    def kill(deaths: ProcessDeaths[str]) -> None:
        child.kill()
        child.wait()

    assert deaths_of(elsewhere, kill, wait_for=0) == []
    assert deaths_of({**elsewhere, "c": name}, lambda deaths: None, wait_for=1) == ["c"]


def test_a_process_whose_clock_since_boot_differs_is_of_elsewhere() -> None:
    """Its start time is another number there, which would look like the death of this process."""
    code = "from chitu.net.process_deaths import pid_namespace; print(pid_namespace())"
    command = ["unshare", "--user", "--time", "--boottime", "1000", "--fork", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() not in ("", pid_namespace())


def test_the_router_knows_of_a_killed_instance_though_its_lease_goes_on(tmp_path: Path) -> None:
    lease = "dp_config.router.pd_disaggregation.deadlines.lease_s=600"
    with forked_router(tmp_path, make_model(tmp_path / "tiny"), [lease]) as router:
        router.start_worker("P0,D0")
        second = router.start_worker("D1")
        assert router.members() == {"P0", "D0", "D1"}
        second.kill()
        wait_until(lambda: router.members() == {"P0", "D0"}, PATIENCE_S, "D1 to be gone")
        wait_until(lambda: f"its process (pid {second.pid}) has ended" in router.log, PATIENCE_S, "the reason")
