"""`deploy/`, checked with Prometheus' own tool: alerts fire when they should, the board's queries are valid, and every
metric exists and follows Prometheus' naming."""

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
from test_metrics import full_report

from chitu.http.metrics_text import render_metrics

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "chitu-alerts.yml"
BOARD = ROOT / "deploy" / "grafana" / "chitu.json"
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


def test_the_boards_queries_are_queries(promtool: str, tmp_path: Path) -> None:
    known = [query.replace("$__rate_interval", "5m").replace("$job", "chitu") for query in queries()]
    assert len(known) > 20
    rules = [{"record": f"board:query:{n}", "expr": query} for n, query in enumerate(known)]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    run(promtool, "check", "rules", path)


def test_what_they_ask_for_is_there() -> None:
    suffix = re.compile(r"(?<=_seconds)_(bucket|count|sum)$")
    for text in [*queries(), ALERTS.read_text()]:
        for name in re.findall(r"\bchitu_\w+", text):
            assert suffix.sub("", name) in KNOWN, name


def test_metrics_are_named_as_prometheus_wants_them(promtool: str) -> None:
    body, _ = render_metrics(full_report())
    run(promtool, "check", "metrics", stdin=body.decode())
