"""A log that cannot be written loses its lines and nothing else: leases and timeouts still end."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from nursery import forked_router
from support.router_process import RouterUnderTest, wait_until

from chitu.tools.make_model import make_model

PATIENCE_S = 20.0
LEASE = "dp_config.router.pd_disaggregation.deadlines.lease_s=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def fill(router: RouterUnderTest, folder: Path) -> None:
    """Let no file grow by a single byte, as on a full disk (with EFBIG instead of ENOSPC)."""
    for pid in router.pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))


Break = Callable[[RouterUnderTest, Path], None]


def stall(router: RouterUnderTest, folder: Path) -> None:
    """Fill the pipe, whose reader reads nothing."""
    pipe = os.open(folder / "router.log", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(select.PIPE_BUF))
    os.close(pipe)


@pytest.fixture(params=["full disk", "reader gone", "reader asleep"])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Break]]:
    """Yield a folder for the router, and a function that makes its log fail permanently."""
    if request.param == "full disk":
        yield tmp_path, fill
        return
    os.mkfifo(tmp_path / "router.log")
    reader = os.open(tmp_path / "router.log", os.O_RDONLY | os.O_NONBLOCK)
    if request.param == "reader asleep":
        yield tmp_path, stall
        os.close(reader)
    else:
        yield tmp_path, lambda router, folder: os.close(reader)


def test_leases_and_time_outs_end_though_the_log_cannot_be_written(model: Path, broken: tuple[Path, Break]) -> None:
    folder, break_log = broken
    with forked_router(folder, model, [LEASE]) as router:
        worker = router.start_worker("P0,D0", "--step-s", "3600")
        break_log(router, folder)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
        for _ in range(3):  # several log lines, each of which fails
            answer = httpx.post(
                f"{router.url}/v1/completions",
                json=body,
                headers={"x-request-timeout": "0.5"},
                timeout=PATIENCE_S,
                trust_env=False,
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: not router.members(), PATIENCE_S, "the leases to end")
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: router.members() == {"P0", "D0"}, PATIENCE_S, "them to join again")
        os.kill(router.pid, signal.SIGTERM)
        assert router.process.wait(PATIENCE_S) == 0
