"""`chitu bench gpu` runs as it is on a machine without a GPU: same code, the interpreter and the eager twin in place of
kernels and graphs. Figures mean nothing then, but every part must come to its end and find the right bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is in the dev extra")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chitu.cli", "bench", "gpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.mark.slow
def test_every_figure_of_a_kernel_a_transfer_and_a_cluster_is_found_on_the_twin(tmp_path):
    found = run("--device", "cpu", "--tiny", "--only", "attention,transfer,served", "--json-dir", tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    record = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())
    assert record["machine"]["device"].startswith("CPU")
    rows = {row["what"]: row for row in record["results"]}
    for beginning in (
        "copy",
        "matmul",
        "7 scattered",
        "decode attention",
        "shm: 4 pages, one write",
        "shm: 4 pages, staged",
        "first token",
        "p99 between",
    ):
        assert [row for what, row in rows.items() if what.startswith(beginning) and row["measured"] > 0], beginning


@pytest.mark.slow
def test_whole_steps_are_timed_on_the_twin(tmp_path):
    found = run("--device", "cpu", "--tiny", "--only", "steps", "--json-dir", tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["results"]
    found_of = [row["of"] for row in rows]
    assert {"byte floor", "executor's time", "turn's time", "matmul rate"} <= set(found_of)


def test_what_cannot_be_measured_is_named_and_the_command_fails(tmp_path):
    """A part that has no time left, and a machine without the device."""
    found = run("--device", "cpu", "--tiny", "--only", "transfer", "--minutes", 0, "--json-dir", tmp_path)
    assert found.returncode == 1
    assert "NOT MEASURED transfer: not run, the time was up" in found.stdout
    found = run("--only", "lunch")
    assert found.returncode == 2 and "lunch" in found.stderr
