"""Results of a benchmark: a printed table and a JSON file, both with the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chitu.net.control_groups import usable_cores

DEFAULT_DIR = Path("bench-results")


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the checked-out commit, with `-dirty` if files differ from it, or `unknown` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def publish(
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    directory: Path = DEFAULT_DIR,
    device: str | None = None,
) -> Path:
    """Print the table, write `<directory>/<name>-<time>.json` and return its path. `device` names the device that
    computed, if not the CPU."""
    table = Table(title=f"{name} at {commit()}" + (f", {device}" if device else ""))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row])
    Console(width=140).print(table)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}.json"
    record = {
        "benchmark": name,
        "commit": commit(),
        "machine": machine() | ({"device": device} if device else {}),
        "results": [dict(zip(columns, row, strict=True)) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path
