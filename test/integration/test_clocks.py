"""No wall clock decides who is who: processes that start with a clock an hour back serve, and all clocks may jump."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cluster import PATIENCE_S, Blow, ChaosCluster
from test_chaos import ALLOWED, RECOVERY_S, Phase, Row, run_cell

from chitu.bench.steady_load import RIGHT

pytestmark = pytest.mark.timeout(150)
SOURCE = Path(__file__).with_name("clock_shim.c")
CELLS: list[tuple[Blow, str, Phase]] = [
    ("SIGKILL", "P0", "decoding"),
    ("SIGKILL", "router", "decoding"),
]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a file `clock` rules the wall clock of what is started."""
    folder = tmp_path_factory.mktemp("clock")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "these tests need a C compiler"
    library = folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    (folder / "clock").write_text("0")
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(folder / "clock")}


@pytest.fixture(scope="module")
def cluster(shim: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    with ChaosCluster(tmp_path_factory.mktemp("clocks"), env=shim) as cluster:
        yield cluster


def test_the_shim_moves_the_wall_clock_alone(shim: dict[str, str]) -> None:
    program = "import time; print(int(time.time()), int(time.monotonic()))"

    def clocks(offset: str) -> list[int]:
        Path(shim["CLOCK_FILE"]).write_text(offset)
        return [int(word) for word in subprocess.check_output([sys.executable, "-c", program], env=shim).split()]

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


@pytest.mark.parametrize(("blow", "target", "phase"), CELLS)
def test_clocks_that_jump_by_an_hour_change_nothing(
    cluster: ChaosCluster, shim: dict[str, str], blow: Blow, target: str, phase: Phase
) -> None:
    clock = Path(shim["CLOCK_FILE"])
    if clock.read_text() != "random":
        clock.write_text("random")
        for name in ("router", "P0", "P1", "D0", "D1"):
            cluster.strike("SIGKILL", name)
            cluster.mend("SIGKILL", name)
        cluster.wait_recovered(RECOVERY_S)
        cluster.load.pause(PATIENCE_S)
        cluster.load.take_answers()
    row = Row(blow, target, phase)
    run_cell(cluster, row)
    assert set(row.outcomes) <= ALLOWED.get((blow, target), set()) | {RIGHT}, "\n".join(row.details)
    assert row.outcomes[RIGHT] > 0 and row.leaked == 0
