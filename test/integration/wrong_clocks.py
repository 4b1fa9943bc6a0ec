"""Processes whose wall clocks are wrong, or jump by an hour: `clock_shim.c` preloaded. Other clocks are right."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")
JUMPING = "random"


@functools.cache
def shim() -> tuple[str, tempfile.TemporaryDirectory[str]]:
    """Path of the library, and the folder that goes with this process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "these tests need a C compiler"
    folder = tempfile.TemporaryDirectory()
    library = f"{folder.name}/clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", library, "-ldl"], check=True)
    return library, folder


def wrong_clocks(folder: Path, offset: str = "0") -> dict[str, str]:
    """The environment in which the file `CLOCK_FILE` rules the wall clock of what is started: seconds, or `JUMPING`."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "clock"
    clock.write_text(offset)
    return {"LD_PRELOAD": shim()[0], "CLOCK_FILE": str(clock)}
