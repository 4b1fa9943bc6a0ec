"""The `chitu` command, whose launchers start the processes of a test's choice: `python -m forked_chitu ROUTER SCHEDULER
torchrun serve ...`, or `direct` in place of `torchrun`. If a nursery forked it, they come from this nursery, too."""

from __future__ import annotations

import os
import sys

from nursery import DESCRIPTOR, forked

from chitu.cli.commands import run
from chitu.launch.plan import Entries

if __name__ == "__main__":
    router, scheduler, starter, *words = sys.argv[1:]
    entries = Entries(router, scheduler, torchrun=starter == "torchrun")
    sys.exit(run(words, forked(entries) if DESCRIPTOR in os.environ else entries))
