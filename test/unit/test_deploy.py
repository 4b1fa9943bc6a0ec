"""`deploy/`, checked with Prometheus' own tool: alerts fire when they should, the queries of board and scalers are
valid, and every metric exists and follows Prometheus' naming. And the command for Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.helm_chart import rendered
from test_metrics import full_report

from chitu.http.fleet.metrics_text import render_metrics

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "chitu-alerts.yml"
BOARD = ROOT / "deploy" / "grafana" / "chitu.json"
SLURM = ROOT / "deploy" / "slurm" / "balance_command.sh"
KNOWN = set(re.findall(r"^\| `(chitu_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
"""Metrics of the document; `test_metrics.py` compares the document with what is served."""


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool", path=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        assert "CI" not in os.environ, "script/setup.sh --dev could not get promtool"
        pytest.skip("promtool is not there: script/setup.sh --dev")
    return found


def run(*command: str | Path, stdin: str = "") -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def queries() -> list[str]:
    panels: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_each_alert_fires_for_its_fault_and_none_without_one(promtool: str, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(Path(__file__).with_name("alert_cases.yml"), tmp_path)
    run(promtool, "check", "rules", ALERTS)
    run(promtool, "test", "rules", tmp_path / "alert_cases.yml")
    cases = (tmp_path / "alert_cases.yml").read_text()
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert f'alertname="{rule["alert"]}"' in cases and set(rule["annotations"]) == {"summary", "action"}


def scalers() -> list[dict[str, Any]]:
    return [one for one in rendered(keda={"enabled": True}) if one["kind"] == "ScaledObject"]


def scaler_queries() -> list[str]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    in_docs = re.findall(r"`(sum\(max by \(role\) \(chitu_wanted.*?\)\))`", text)
    assert len(in_docs) == 1
    return [trigger["metadata"]["query"] for one in scalers() for trigger in one["spec"]["triggers"]] + in_docs


def test_the_queries_of_board_and_scalers_are_queries(promtool: str, tmp_path: Path) -> None:
    known = [query.replace("$__rate_interval", "5m").replace("$job", "chitu") for query in queries()]
    assert len(known) > 20
    known += scaler_queries()
    rules = [{"record": f"board:query:{n}", "expr": query} for n, query in enumerate(known)]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    run(promtool, "check", "rules", path)


def test_what_they_ask_for_is_there() -> None:
    suffix = re.compile(r"(?<=_seconds)_(bucket|count|sum)$")
    for text in [*queries(), *scaler_queries(), ALERTS.read_text()]:
        for name in re.findall(r"\bchitu_\w+", text):
            assert suffix.sub("", name) in KNOWN, name


def test_metrics_are_named_as_prometheus_wants_them(promtool: str) -> None:
    body, _ = render_metrics(full_report())
    run(promtool, "check", "metrics", stdin=body.decode())


def test_each_scaler_has_its_wish() -> None:
    for one in scalers():
        role = one["metadata"]["name"].removeprefix("serve-chitu-")
        (trigger,) = one["spec"]["triggers"]
        assert trigger["metadata"]["query"] == f'max(chitu_wanted_instances{{role="{role}",namespace="llm"}})'
        # One replica for each that is wanted; and a router that is away asks for nothing, rather than for none.
        assert trigger["metricType"] == "AverageValue" and trigger["metadata"]["threshold"] == "1"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert [one["metadata"]["name"] for one in scalers()] == ["serve-chitu-prefill", "serve-chitu-decode"]
    (router,) = (one for one in rendered(keda={"enabled": True}) if one["kind"] == "StatefulSet")
    assert "dp_config.router.balance=advise" in router["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("wanted", "fixed", "jobs", "expected"),
    [
        (5, 2, ["R", "PD"], ["sbatch chitu-decode"]),
        (5, 0, [], ["sbatch chitu-decode"] * 5),
        (2, 1, ["R", "PD", "PD"], ["scancel 2 3"]),
        (1, 0, ["R", "R"], []),
    ],
)
def test_the_command_for_slurm_submits_what_is_missing(
    wanted: int, fixed: int, jobs: list[str], expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / "jobs").write_text("".join(f"{n} {state}\n" for n, state in enumerate(jobs, 1)))
    for name, text in (
        ("squeue", 'case "$*" in *RUNNING*) p=. ;; *) p=PD ;; esac; grep "$p" jobs | cut -d" " -f1'),
        ("sbatch", '[[ "$*" == *"--gpus 1"*"join decode --url \'http://r:1\'"* ]] && echo "sbatch $2" >> calls'),
        ("scancel", 'echo "scancel $*" >> calls'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    names = {"CHITU_URL": "http://r:1", "CHITU_FIXED_decode": str(fixed), "CHITU_SBATCH": "--gpus 1"}
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **names}
    done = subprocess.run(
        [SLURM, "decode", str(wanted), "1"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == expected
