"""Processes whose wall clocks are wrong, or jump by an hour: `clock_shim.c` preloaded. Their other clocks are right."""

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
    """Return the path of the library, and the temporary folder that lives as long as this process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "these tests need a C compiler"
    folder = tempfile.TemporaryDirectory()
    library = f"{folder.name}/clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", library, "-ldl"], check=True)
    return library, folder


def wrong_clocks(folder: Path, offset: str = "0") -> dict[str, str]:
    """Return the environment in which the file `CLOCK_FILE` controls the wall clock of child processes: seconds, or
    `JUMPING`."""
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "clock"
    clock.write_text(offset)
    return {"LD_PRELOAD": shim()[0], "CLOCK_FILE": str(clock)}
