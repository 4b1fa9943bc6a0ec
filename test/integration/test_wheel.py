"""A wheel of this tree, installed into a bare environment and started from there, far from the sources."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from zipfile import ZipFile

from serve_process import ServeProcess

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def _run(*argv: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _build(tmp_path: Path) -> Path:
    """Build the wheel from a copy, so that no older build gets into it; without isolation, so that it needs no
    network."""
    copy = tmp_path / "sources"
    for package in ("chitu", "benchmark"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    _run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('dist')", cwd=copy)
    (wheel,) = (copy / "dist").glob("*.whl")
    shutil.move(wheel, tmp_path)
    shutil.rmtree(copy)
    return tmp_path / wheel.name


def _install(wheel: Path, folder: Path) -> Path:
    """Install the wheel, with the dependencies of the environment that runs this test; return the environment's
    `bin`."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=wheel.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file comes after the environment's own, and .pth files in it, as of an editable chitu, are not
    # read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install")
    _run(*pip, "--quiet", "--no-index", "--no-deps", str(wheel), cwd=wheel.parent)
    return folder / "bin"


def test_a_wheel_serves_far_from_the_sources(tmp_path: Path) -> None:
    wheel = _build(tmp_path)
    assert wheel.name.startswith("chitu_pd-")
    assert {name.split("/")[0].split("-")[0] for name in ZipFile(wheel).namelist()} == {"chitu", "chitu_pd"}
    binaries = _install(wheel, tmp_path / "env")
    home = _run(str(binaries / "python"), "-c", "import chitu; print(chitu.__file__)", cwd=tmp_path)
    assert home.startswith(str(tmp_path)), home
    (version,) = set(wheel.name.split("-")[1:2])
    assert _run(str(binaries / "chitu"), "--version", cwd=tmp_path) == f"chitu {version}\n"

    argv = [str(binaries / "chitu"), "serve", "--port", "0", "--first-completion", "--log-dir", str(tmp_path / "logs")]
    with ServeProcess(argv, cwd=tmp_path) as process:
        url = process.wait_line(r"at (http://127\.0\.0\.1:\d+)", timeout_s=120)[1]
        assert "4827" in process.printed_request()
        answer = process.wait_line(r"^answer: +The .* (\d{4})\.$", timeout_s=60)[1]
        process.wait_line(f"^ +✓ {answer} is right$")
        process.wait_line(
            r"^served by: +P0 -> D0 · \d{3,4} prompt \+ \d+ output tokens · (\d+ cached · )?[\d.]+ MiB KV"
        )
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"<title>" in page.read()
        code = process.signal_and_wait(signal.SIGTERM)
    assert code == 0
