"""`chitu serve` with the real processes: it answers, recovers, ends in time, and leaves no process behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serve_process import ServeProcess
from support.router_process import wait_until

from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
CHITU = [sys.executable, "-m", "chitu.cli"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def request(port: int, method: str, path: str, body: dict[str, object] | None = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def complete(port: int) -> tuple[int, dict[str, object]]:
    body = {"model": "tiny", "prompt": [300, 301, 302], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return request(port, "POST", "/v1/completions", body)


def test_serve_answers_heals_and_ends_what_runs_at_the_signal(model: Path, tmp_path: Path) -> None:
    argv = [*CHITU, "serve", "--model", str(model), "--port", "0", "--log-dir", str(tmp_path / "logs")]
    with ServeProcess([*argv, "cache.num_pages=256", "model.max_model_len=1024"]) as process:
        port = int(process.wait_line(r"with P0, D0 at http://127\.0\.0\.1:(\d+)", timeout_s=120)[1])
        assert re.search(r'"completion_tokens":[1-9]', process.printed_request()), "a drawn eos may end it early"
        status, first = complete(port)
        assert status == 200
        assert first["usage"]["completion_tokens"] == 8  # type: ignore[index]

        (decode,) = process.pids_of("decode")
        (prefill,) = process.pids_of("prefill")
        os.kill(decode, signal.SIGKILL)
        process.wait_line(r"D0 ended \(killed by SIGKILL\)")
        process.wait_line("D0 is started again")
        wait_until(lambda: process.pids_of("decode") not in ([], [decode]), 60, "a new D0")
        wait_until(lambda: complete(port)[0] == 200, 60, "an answer from the new D0")
        assert complete(port)[1]["choices"] == first["choices"]
        assert process.pids_of("prefill") == [prefill]

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = {
            "model": "tiny",
            "prompt": [300],
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        process.process.send_signal(signal.SIGTERM)
        events = [line for line in reply.read().split(b"\n") if line]
        # Within the drain time it either completes or gets an error: it is never cut off silently.
        assert events[-1] == b"data: [DONE]" or b'"error"' in events[-1]
        connection.close()
        assert process.process.wait(60) == 0
        assert process.offspring() == {}
        assert {path.name for path in (tmp_path / "logs").glob("*.log")} == {"router.log", "P0.log", "D0.log"}
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
            pass


@pytest.mark.by_hand  # in CI with a stand-in for what torchrun starts: test_nobody_outlives_a_supervisor_that_is_killed
def test_kill_9_of_the_supervisor_leaves_no_orphan(model: Path) -> None:
    argv = [*CHITU, "serve", "unified_local", "--model", str(model), "--port", "0", "cache.num_pages=256"]
    with ServeProcess(argv) as process:
        process.wait_line("Ctrl-C ends it", timeout_s=120)
        assert len(process.offspring()) >= 3  # router, torchrun, scheduler
        process.signal_and_wait(signal.SIGKILL)
        wait_until(lambda: process.offspring() == {}, 5, f"no orphans, but {process.offspring()}")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["dp_config.router.prot=1"], "did you mean 'dp_config.router.port'?"),
        (["--model", "/nowhere/at/all"], "there is no such folder"),
        (["dp_config.router.stats_port=21003", "--model", "MODEL"], "both port 21003"),
        (["no_such_topology"], "there is no topology file"),
        (
            ["--model", "MODEL", "dp_config.router.decode_schedulers.0={tp_size: 2, devices: [cpu]}"],
            "one device per rank",
        ),
    ],
)
def test_a_wrong_configuration_is_one_sentence_and_exit_code_2(model: Path, arguments: list[str], part: str) -> None:
    words = [str(model) if word == "MODEL" else word for word in arguments]
    result = subprocess.run([*CHITU, "serve", *words], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert part in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
