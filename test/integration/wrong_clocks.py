"""Processes whose wall clocks are wrong, or jump by an hour: `clock_shim.c` preloaded. Other clocks are right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")
JUMPING = "random"


def wrong_clocks(folder: Path, offset: str = "0") -> dict[str, str]:
    """The environment in which the file `CLOCK_FILE` rules the wall clock of what is started: seconds, or `JUMPING`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "these tests need a C compiler"
    folder.mkdir(parents=True, exist_ok=True)
    library, clock = folder / "clock.so", folder / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True)
    clock.write_text(offset)
    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(clock)}
