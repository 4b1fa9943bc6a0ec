"""`deploy/compose.yaml` and `deploy/systemd`: checked by the parsers of others, their commands by our own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from chitu.cli.arguments import make_parser
from chitu.config.load import load_topology

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
UNITS = ("chitu.service", "chitu-join@.service")
PROGRAM = "/opt/chitu/.venv/bin/chitu"
GIVEN = {"CHITU_CLUSTER_KEY": "0123456789abcdef", "CHITU_MODEL": "/srv/models/M"}
ARGUMENTS = {
    "$CHITU_ARGUMENTS": "node /etc/chitu/cluster.yaml --node-index 0",
    "$CHITU_JOIN": "--devices 0,1",
    "${CHITU_URL}": "http://router:21003",
    "%i": "decode",
}
"""What the operator writes into the units' environment, and a unit's name."""


def filled(text: str) -> str:
    """Return a compose file with its variables replaced as compose does. Raise KeyError for one that has to be set."""

    def word(found: re.Match[str]) -> str:
        name, rule, other = found.groups()
        return GIVEN.get(name) or (other if rule == ":-" else GIVEN[name])

    return re.sub(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", word, text)


def services() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = yaml.safe_load(filled(COMPOSE.read_text()))["services"]
    return known


def test_compose_takes_the_file_and_no_field_that_it_does_not_know() -> None:
    spec = pytest.importorskip("compose_spec") if "CI" not in os.environ else __import__("compose_spec")
    text = yaml.safe_dump(yaml.safe_load(filled(COMPOSE.read_text())))  # anchors are replaced
    assert sorted(spec.PyCompose.from_yaml(text).service_names()) == ["decode", "prefill", "router"]
    for wrong in (
        text.replace("stop_grace_period:", "stop_grace:"),
        text.replace("start_period: 10m", "start_period: soon"),
    ):
        assert wrong != text
        with pytest.raises(ValueError):
            spec.PyCompose.from_yaml(wrong)


def test_each_service_runs_a_command_of_ours_and_writes_to_its_volumes_only() -> None:
    for name, one in services().items():
        options, rest = make_parser()[0].parse_known_args(one["command"])
        settings = [*rest, *getattr(options, "topology", [])]
        topology = load_topology("router_alone", [word for word in settings if "=" in word])
        assert topology.dp_config.probe_port == 9000
        seconds = topology.dp_config.router.pd_disaggregation.deadlines.drain_s
        assert one["stop_grace_period"] == "1m" and seconds + 0.5 < 60
        targets = {volume.split(":")[1] for volume in one["volumes"]} | {path.split(":")[0] for path in one["tmpfs"]}
        assert one["read_only"] and targets == {"/tmp", "/cache", "/models/model"} and one["shm_size"]
        assert name == "router" or f"--url=http://router:{topology.dp_config.router.port}" in one["command"]
        compile(one["healthcheck"]["test"][-1], name, "exec")


@pytest.mark.parametrize("variable", ["CHITU_CLUSTER_KEY", "CHITU_MODEL"])
def test_a_cluster_without_a_key_or_a_model_is_not_started(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GIVEN, variable)
    with pytest.raises(KeyError):
        filled(COMPOSE.read_text())


def unit(name: str) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def verify(folder: Path, name: str, text: str) -> str:
    """Return what systemd says of a unit; its program is one that is here."""
    path = folder / name.replace("@", "@decode")
    path.write_text(text.replace(PROGRAM, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_knows_every_setting_of_a_unit(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    assert verify(tmp_path, name, text) == ""
    assert "Unknown key" in verify(tmp_path, name, text.replace("KillMode", "KilMode"))


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_command_of_ours_and_lets_requests_finish(name: str) -> None:
    settings = unit(name)
    for line in (*settings["ExecStart"], *settings.get("ExecStop", ())):
        for variable, words in ARGUMENTS.items():
            line = line.replace(variable, words)
        program, *words = shlex.split(line)
        assert program == PROGRAM
        make_parser()[0].parse_args(words)
    assert settings["KillMode"] == ["mixed"] and settings["Restart"] == ["on-failure"]
    deadlines = load_topology("router_alone", []).dp_config.router.pd_disaggregation.deadlines
    assert int(settings["TimeoutStopSec"][0]) > deadlines.drain_s + deadlines.drain_delay_s + 0.5
    assert settings["RestartPreventExitStatus"] == ["2"]  # a wrong configuration
