"""A snapshot with pages: one file, which goes on in another cluster without computing what it brings."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nursery import FORKED
from support.router_process import wait_until

from chitu import cli
from chitu.config.cluster_key import cluster_key_of
from chitu.config.load import load_topology
from chitu.errors import ConfigError, IncompatibleLayout
from chitu.launch.local import LocalCluster
from chitu.launch.router_calls import credential
from chitu.launch.router_client import RouterClient
from chitu.protocol.kept_request import DamagedFile, unpack
from chitu.tools.make_model import make_model
from chitu.tools.snapshot_pages import Source, read, restore

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 1000
PROMPT = [*range(5, 5 + 16 * 8)]
NUM_PAGES = 8


def settings(model: Path, folder: Path) -> list[str]:
    return [
        *(f"model.path={model}", "model.served_name=m", "cache.num_pages=500", "scheduler.threads=1"),
        *(f"cache.disk.path={folder / 'disk'}", "cache.host_bytes=50000000", "cache.load_timeout_s=60"),
        f"dp_config.router.kept_requests.dir={folder / 'kept'}",
    ]


def stream(url: str, has_begun: threading.Event) -> list[int]:
    """Return the tokens of a seeded request with the id `one`; set `has_begun` after some."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "return_token_ids": True}
    body |= {"ignore_eos": True, "temperature": 1.0, "top_k": 4, "seed": 5}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    request.add_header("x-request-id", "one")
    with urllib.request.urlopen(request, timeout=200) as reply:
        return tokens_of(reply, has_begun)


def tokens_of(lines: Any, has_begun: threading.Event) -> list[int]:
    found: list[int] = []
    for line in lines:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            found += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
        if len(found) >= 40:
            has_begun.set()
    return found


def test_a_file_with_pages_goes_on_in_another_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other_model = (make_model(tmp_path / name, layers=2, seed=seed) for seed, name in enumerate("ab"))
    here = load_topology("pd_disagg_1p1d_local", settings(model, tmp_path / "here"))
    there = load_topology("unified_local", settings(model, tmp_path / "there"))
    file = tmp_path / "one.snapshot"
    with LocalCluster(here, entries=FORKED) as first, LocalCluster(there, entries=FORKED) as second:
        first.wait_ready(200)
        second.wait_ready(200)
        has_begun = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(stream, first.url, has_begun)
            assert has_begun.wait(60)
            wait_until(lambda: len([*(tmp_path / "here" / "disk").glob("*/*.kv")]) >= NUM_PAGES, 60, "pages on disk")
            monkeypatch.setenv("CHITU_CLUSTER_KEY", cluster_key_of(first.topology))
            assert cli.main(["snapshot", "one", str(file), "--pages", "--url", first.url]) == 0
            assert f"{NUM_PAGES} pages" in capsys.readouterr().out
            expected = asked.result(100)
        data = file.read_bytes()
        _, request, records = read(data)
        assert len(records) == NUM_PAGES and 40 <= len(unpack(request).token_ids) < NUM_TOKENS
        assert file.stat().st_mode & 0o777 == 0o600

        monkeypatch.setenv("CHITU_CLUSTER_KEY", cluster_key_of(second.topology))
        target = Source.of(RouterClient(second.url, credential(second.url)))
        others = load_topology("unified_local", settings(other_model, tmp_path / "there"))
        refuse_faults(data, target, tmp_path / "there", replace(target, topology=others, fingerprint=bytes(16)))
        assert cli.main(["restore", str(file), "--url", second.url]) == 0, capsys.readouterr()
        assert f"goes on with {NUM_PAGES} pages" in capsys.readouterr().out

        def answer() -> list[int] | None:
            url = f"{second.url}/v1/requests/one"
            try:
                with urllib.request.urlopen(url, timeout=100) as reply:
                    return tokens_of(reply, has_begun)
            except urllib.error.HTTPError:
                return None

        found: list[list[int]] = []
        wait_until(lambda: bool((tokens := answer()) and not found.append(tokens)), 100, "the answer")
        assert found[0] == expected and len(expected) == NUM_TOKENS
        loads = [each.load for each in RouterClient(second.url, credential(second.url)).cluster().instances]
        computed = sum(load.prompt_tokens for load in loads if load is not None)
        assert computed < len(unpack(request).token_ids) + 16, "the prompt was computed again"


def refuse_faults(data: bytes, target: Source, folder: Path, wrong: Source) -> None:
    """No damaged file and no file of other weights puts anything anywhere."""
    for place in (0, 9, len(data) // 3, len(data) // 2, len(data) - 1):
        with pytest.raises(DamagedFile):
            restore(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], target, "x")
    for end in (0, 10, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(DamagedFile):
            restore(data[:end], target, "x")
    with pytest.raises(IncompatibleLayout, match="other weights"):
        restore(data, wrong, "x")
    router = target.topology.dp_config.router
    keeps_none = load_topology("unified_local", [])
    assert router.kept_requests.dir is not None
    with pytest.raises(ConfigError, match=r"kept_requests\.dir"):
        restore(data, replace(target, topology=keeps_none), "x")
    assert not (folder / "disk" / "restored").exists() and not [*(folder / "kept").glob("*.request")]
