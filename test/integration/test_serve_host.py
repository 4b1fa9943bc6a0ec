"""`chitu serve --host`: the HTTP API can be reached from outside, and nothing else of the cluster can."""

from __future__ import annotations

import ipaddress
import json
import signal
import sys
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from network import Network
from nursery import chitu
from serve_process import ServeProcess

from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(300)
LISTENING = "0A"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=1)


def serve(model: Path, *arguments: str) -> list[str]:
    sizes = ["cache.num_pages=64", "model.max_model_len=256"]
    return [sys.executable, "-m", "chitu.cli", "serve", "--model", str(model), *arguments, *sizes]


def complete(url: str) -> int:
    """Complete a prompt and return the number of tokens."""
    body = {"model": "tiny", "prompt": [300, 301, 302], "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return int(json.load(reply)["usage"]["completion_tokens"])


def listening() -> set[tuple[str, int]]:
    """Return addresses and ports of all TCP listeners of this thread's network namespace."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == LISTENING:
                address, port = local.split(":")
                # Words of four bytes, each in this machine's byte order.
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def test_all_addresses_are_those_of_the_api_alone(model: Path) -> None:
    with Network(["server", "client"]) as network:
        argv = network.argv("server", serve(model, "--host", "0.0.0.0", "--port", "21003"))
        with ServeProcess(argv, popen=partial(chitu, torchrun=True)) as process:
            process.wait_line("NO API KEY: the API listens on 0.0.0.0")
            process.wait_line("at http://127.0.0.1:21003", timeout_s=120)
            with network.inside("client"):
                assert complete(f"http://{network.address('server')}:21003") == 4
            with network.inside("server"):
                ports = listening()
            assert ("0.0.0.0", 21003) in ports
            others = ports - {("0.0.0.0", 21003)}
            assert len(others) >= 5 + 2, "the router's other ports and the instances'"
            assert {address for address, _ in others} == {"127.0.0.1"}
            assert process.signal_and_wait(signal.SIGTERM) == 0


def test_one_address_is_that_of_several_routers_too(model: Path) -> None:
    hosts = "dp_config.router.hosts=[127.0.0.1, 127.0.0.1]"
    argv = serve(model, "unified_local", "--host", "127.0.0.2", "--port", "0", hosts)
    with ServeProcess(argv, popen=chitu) as process:
        url = process.wait_line(r"at (http://127\.0\.0\.2:\d+)", timeout_s=120)[1]
        assert complete(url) == 4
        with pytest.raises(OSError, match="refused"):
            complete(url.replace("127.0.0.2", "127.0.0.1"))
        assert process.signal_and_wait(signal.SIGTERM) == 0
        assert not [line for line in process.lines if "NO API KEY" in line]
