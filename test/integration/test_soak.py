"""Ten seconds of `python -m benchmark.soak`; run the long one by hand (docs/verify.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_seconds_of_load_with_accidents_is_right_and_flat(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmark.soak", "--minutes", "0.17", "--sample-s", "2"]
    argv += ["--accident-s", "2", "--json-dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    (path,) = tmp_path.glob("soak-*.json")
    samples = json.loads(path.read_text())["samples"]
    assert sum(sample["outcomes"]["right"] for sample in samples) > 100
    assert any(sample["accidents"] for sample in samples)  # how many fit into ten seconds depends on the machine


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_an_hour_of_restarts_with_two_releases_is_right_and_flat(tmp_path: Path) -> None:
    minutes = os.environ.get("SOAK_MINUTES", "60")
    argv = [sys.executable, "-m", "benchmark.soak", "--minutes", minutes, "--engine", "tiny", "--mixed"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv += ["--json-dir", str(tmp_path)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=5300, check=False, env=environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
