"""The `chitu` command. Its launchers start their processes from the nursery of the test that started it."""

from __future__ import annotations

import sys

from nursery import forked

from chitu.cli.commands import run
from chitu.launch.plan import Entries

if __name__ == "__main__":
    sys.exit(run(entries=forked(Entries(torchrun=False))))
