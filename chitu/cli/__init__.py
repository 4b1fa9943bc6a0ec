"""The entry of the `chitu` command. Ctrl-C ends it silently while it still imports its modules, and it runs without
standard streams."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # which would print where an import was
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the starter has closed it; the next file would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    from chitu.cli.commands import run

    return run(argv)
