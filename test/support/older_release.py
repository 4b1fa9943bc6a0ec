"""Processes of the release before, beside those of this one, in one cluster of real processes."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chitu.types import Role, instance_name

ROOT = Path(__file__).parents[2]
LAST_OF_20 = "810b4b9d"
"""Last commit of the release with version 20 of the wire."""


def older_release(folder: Path) -> Path:
    """Return a folder with the package of the release before, from the history. Raise FileNotFoundError without it."""
    found = subprocess.run(["git", "-C", ROOT, "archive", LAST_OF_20, "chitu"], capture_output=True)
    if found.returncode:
        raise FileNotFoundError(f"the history lacks {LAST_OF_20}, the release before: a shallow clone, or no git")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", folder], input=found.stdout, check=True)
    return folder


class MixedReleases:
    """`Entries.popen` of a cluster of which some processes run an older release."""

    def __init__(
        self, folder: Path, names: Sequence[str] = (), newer: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        """`folder`: the older release. `names`: `router`, `P0`, ... that run it; read anew at each start. `newer`
        starts those of this release."""
        self.folder, self.names, self._newer = folder, set(names), newer

    def draw(self, name: str, rng: random.Random) -> str:
        """Choose the release of the next start of a process at random. Return it in a word."""
        is_older = rng.random() < 0.5
        (self.names.add if is_older else self.names.discard)(name)
        return "older" if is_older else "newer"

    def __call__(self, argv: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        is_older = _name(argv) in self.names
        folder, start = (self.folder, subprocess.Popen) if is_older else (ROOT, self._newer)
        return start(argv, env={**env, "PYTHONPATH": str(folder)}, cwd=folder, **options)


def _name(argv: Sequence[str]) -> str:
    if "--role" not in argv:
        return "router"
    role, rank = (argv[list(argv).index(key) + 1] for key in ("--role", "--rank"))
    return instance_name(Role(role), int(rank))
