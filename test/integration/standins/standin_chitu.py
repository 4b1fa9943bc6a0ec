"""The `chitu` command with the stand-ins of this folder: `python -m standin_chitu torchrun serve ...`, or `direct` in
place of `torchrun`. Started by a test's nursery, its launchers start their processes from it, too."""

from __future__ import annotations

import os
import sys

from nursery import DESCRIPTOR, forked

from chitu.cli.commands import run
from chitu.launch.plan import Entries

if __name__ == "__main__":
    starter, *words = sys.argv[1:]
    entries = Entries("standin_router", "standin_scheduler", torchrun=starter == "torchrun")
    sys.exit(run(words, forked(entries) if DESCRIPTOR in os.environ else entries))
