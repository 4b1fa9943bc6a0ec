"""No wall clock decides the identity of a process: processes that start with a clock an hour back serve.

The chaos matrix (`test_chaos.py`) shows that all clocks may jump at any time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_cluster import ChaosCluster
from nursery import popen
from support.steady_load import RIGHT
from test_chaos import RECOVERY_S
from wrong_clocks import wrong_clocks

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return wrong_clocks(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def cluster(shim: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with ChaosCluster(tmp_path_factory.mktemp("clocks"), env=shim) as cluster:
        yield cluster


@pytest.mark.parametrize("start", [subprocess.Popen, popen], ids=["exec", "fork"])
def test_the_shim_moves_the_wall_clock_alone(
    shim: dict[str, str], tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    (tmp_path / "two_clocks.py").write_text("import time; print(int(time.time()), int(time.monotonic()))")

    def clocks(offset: str) -> list[int]:
        Path(shim["CLOCK_FILE"]).write_text(offset)
        with (tmp_path / "output").open("wb") as output:
            environment = {"PYTHONPATH": str(tmp_path), **shim}
            assert start([sys.executable, "-m", "two_clocks"], env=environment, stdout=output).wait(60) == 0
        return [int(word) for word in (tmp_path / "output").read_text().split()]

    before, after = clocks("0"), clocks("-3600")
    assert -3600 <= after[0] - before[0] < -1800 and 0 <= after[1] - before[1] < 1800


@pytest.mark.parametrize("names", [("P0", "P1"), ("D0", "D1"), ("router",)], ids=["P", "D", "router"])
def test_who_starts_again_with_a_clock_that_went_back_serves(
    cluster: ChaosCluster, shim: dict[str, str], names: tuple[str, ...]
) -> None:
    Path(shim["CLOCK_FILE"]).write_text("-3600")
    for name in names:
        cluster.strike("SIGKILL", name)
    for name in names:
        cluster.mend("SIGKILL", name)
    cluster.wait_recovered(RECOVERY_S)
    assert {answer.outcome for answer in cluster.load.take_answers()} == {RIGHT}
