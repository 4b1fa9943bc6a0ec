"""`--model` with the id of a repository: from the local cache, from a hub, and one sentence if neither has it."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import FORKED, run_chitu
from support.gguf_files import convert

from chitu.assets import TINY_MODEL_DIR
from chitu.cli.commands import run
from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.launch.model_source import find_model
from chitu.launch.router_client import RouterClient

REPOSITORY, COMMIT = "acme/Tiny-0.1B", "a" * 40
NOBODY = "http://127.0.0.1:9"
GGUF_FILES: list[Path] = []
"""Files beside the embedded model that the hub has."""
SECOND_COPIES = ("consolidated.safetensors", "original/model.safetensors")
"""Weights that a hub lists besides the checkpoint's."""


def chitu(tmp_path: Path, *words: str, endpoint: str = NOBODY) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, "-m", "chitu.cli", *words],
        env={**environment, "HF_HUB_DISABLE_XET": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Create the repository's snapshot in the cache and return its folder."""
    folder = tmp_path / "hf" / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    shutil.copytree(TINY_MODEL_DIR, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return folder / "snapshots" / COMMIT


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home folder of the processes: empty but for the compiled kernels, which take a while."""
    cache = tmp_path / "home" / ".cache" / "chitu"
    cache.mkdir(parents=True)
    for kernels in (Path.home() / ".cache" / "chitu").glob("native-*.so"):
        (cache / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download needs."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/{REPOSITORY}" or path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            names = [file.name for file in (*_tiny_files(), *GGUF_FILES)] + [*SECOND_COPIES]
            listed = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._answer(json.dumps(listed).encode(), "application/json")
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                for file in _tiny_files()
            ]
            entries += [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                for file in GGUF_FILES
            ]
            entries += [{"type": "file", "path": name, "size": 9, "oid": "0" * 40} for name in SECOND_COPIES]
            self._answer(json.dumps(entries).encode(), "application/json")
        elif path.startswith(f"/{REPOSITORY}/resolve/") and (file := _file(path)).is_file():
            self._answer(file.read_bytes(), "application/octet-stream", _etag(file))
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, body: bytes, kind: str, etag: str = "") -> None:
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("X-Repo-Commit", COMMIT)):
            self.send_header(name, value)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def _tiny_files() -> list[Path]:
    return [file for file in TINY_MODEL_DIR.iterdir() if file.suffix != ".safetensors" or not GGUF_FILES]


def _file(path: str) -> Path:
    for file in GGUF_FILES:
        if file.name == Path(path).name:
            return file
    return TINY_MODEL_DIR / Path(path).name.replace("consolidated", "model")


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_repository_in_the_cache_is_served_under_its_id(cached: Path, tmp_path: Path) -> None:
    done = chitu(tmp_path, "plan", "--model", REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert f"model.path={cached}" in done.stdout and f"model.served_name={REPOSITORY}" in done.stdout
    named = chitu(tmp_path, "plan", "--model", REPOSITORY, "model.served_name=mine")
    assert "model.served_name=mine" in named.stdout and f"served_name={REPOSITORY}" not in named.stdout


def test_a_gguf_file_of_a_hub_is_downloaded_and_served_by_its_kind(
    hub: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"F16": "Tiny-F16.gguf", "Q8_0": "Tiny-Q8_0.gguf"}
    monkeypatch.setattr(
        sys.modules[__name__],
        "GGUF_FILES",
        [convert(TINY_MODEL_DIR, tmp_path / name, kind) for kind, name in kinds.items()],
    )
    name = f"{REPOSITORY}:q8_0"
    assert "--include '*q8_0*'" in chitu(tmp_path, "plan", "--model", name, endpoint=hub).stderr
    done = chitu(tmp_path, "serve", "--model", name, "cache.num_pages=99999999999", endpoint=hub)
    assert done.returncode == 2 and f"downloading {name}" in done.stderr, done.stderr
    (snapshot,) = (tmp_path / "hf" / "hub").glob("models--*/snapshots/*")
    assert [file.name for file in snapshot.iterdir()] == ["Tiny-Q8_0.gguf"]
    again = chitu(tmp_path, "plan", "--model", name)
    assert again.returncode == 0, again.stderr
    assert f'model.served_name="{name}"' in again.stdout
    assert f"model.path={home}/.cache/chitu/gguf/Tiny-Q8_0-" in again.stdout
    missing = chitu(tmp_path, "serve", "--model", f"{REPOSITORY}:Q2_K", endpoint=hub)
    assert missing.returncode == 2 and "has not one GGUF file of this kind (none)" in missing.stderr
    without = chitu(tmp_path, "serve", "--model", REPOSITORY, endpoint=hub)
    assert without.returncode == 2 and f"give the kind of one, too: {REPOSITORY}:Q4_K_M" in without.stderr


def test_a_gguf_file_is_served_with_the_answers_of_its_checkpoint(home: Path, tmp_path: Path) -> None:
    file = convert(TINY_MODEL_DIR, tmp_path / "My Tiny.gguf")
    command = [sys.executable, "-m", "chitu.cli", "serve", "--model", str(file), "--once", "--port", "0"]
    done = run_chitu(command, os.environ, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chitu serves 'My Tiny' with P0, D0" in done.stderr
    assert "I only know lists of facts" in done.stdout, "what the embedded model answers to other prompts"


@pytest.mark.by_hand
def test_a_receipt_of_a_gguf_file_is_replayed_by_its_cluster_and_by_the_file(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cluster is verified, too."""
    file = convert(TINY_MODEL_DIR, tmp_path / "tiny.gguf", "Q8_0")
    settings = [f"model.path={find_model(str(file), False, print).path}", "cache.num_pages=1000"]
    body = {"prompt": "The red fox has number 4827.", "temperature": 0.9, "seed": 3, "ignore_eos": True}
    body |= {"return_proof": True, "return_receipt": True}
    with LocalCluster(load_topology("pd_disagg_1p1d_local.yaml", settings), entries=FORKED) as cluster:
        cluster.wait_ready()
        _, answer = RouterClient(cluster.url).post("/v1/completions", body, 60)
        (tmp_path / "answer.json").write_bytes(answer)
        replay = ["replay", str(tmp_path / "answer.json")]
        assert run([*replay, "--url", cluster.url]) == 0, capsys.readouterr()
        verify = ["verify", cluster.url, "--model", str(file), "--no-transformers"]
        assert run(verify, FORKED) == 0, capsys.readouterr()
    assert run([*replay, "--model", str(file)], FORKED) == 0, capsys.readouterr()


def test_what_is_no_model_is_told_from_a_gguf_file(home: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    first = convert(TINY_MODEL_DIR, files / "a.gguf")
    (files / "mmproj-a.gguf").write_bytes(b"no model")
    alone = chitu(tmp_path, "plan", "--model", str(files))
    assert alone.returncode == 0 and 'model.served_name="a"' in alone.stdout, alone.stderr
    (files / "config.json").write_text("{}")  # as in some repositories, without a tokenizer
    assert chitu(tmp_path, "plan", "--model", str(files)).stdout == alone.stdout
    (files / "config.json").unlink()
    (files / "b.gguf").write_bytes(first.read_bytes()[:5000])
    for words, part in (
        (["--model", str(files)], "holds 2 models: give the file of one of them (a.gguf, b.gguf)"),
        (["--model", str(files / "b.gguf")], "is cut off"),
        (["--model", str(files / "c.gguf")], "there is no such file"),
        ([f"model.path={first}"], "which is a file: give it as --model"),
        ([f"model.path={files}"], "which has GGUF files and no config.json: give one of the files as --model"),
    ):
        done = chitu(tmp_path, "plan", *words)
        assert done.returncode == 2 and part in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.by_hand
def test_without_a_network_it_is_one_sentence(cached: Path, tmp_path: Path) -> None:
    for words, part in (
        (["serve", "--model", "Qwen/Qwen3-0.6B"], "127.0.0.1 cannot be reached (Connection refused)"),
        (["plan", "--model", "Qwen/Qwen3-0.6B"], "`hf download Qwen/Qwen3-0.6B` puts it there"),
        (["serve", "Qwen/Qwen3-0.6B"], "a model is given as --model"),
    ):
        done = chitu(tmp_path, *words)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert part in line
    next(cached.glob("*.safetensors")).unlink()
    half = chitu(tmp_path, "serve", "--model", REPOSITORY)
    assert "the cache has a part of it" in half.stderr and "holds no safetensors file" in half.stderr


def test_a_repository_of_a_hub_is_downloaded_and_served(hub: str, tmp_path: Path) -> None:
    done = chitu(tmp_path, "serve", "--model", REPOSITORY, "cache.num_pages=99999999999", endpoint=hub)
    # The download is complete; the launcher refuses what it can check only after reading the model.
    assert done.returncode == 2, done.stderr
    assert f"downloading {REPOSITORY}" in done.stderr
    (snapshot,) = (tmp_path / "hf" / "hub").glob("models--*/snapshots/*")
    assert [file.name for file in snapshot.rglob("*.safetensors")] == ["model.safetensors"]
    again = chitu(tmp_path, "plan", "--model", REPOSITORY)
    assert again.returncode == 0, again.stderr
    assert chitu(tmp_path, "serve", "--model", "acme/none", endpoint=hub).returncode == 2
