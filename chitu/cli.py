"""The entry of the `chitu` command, which ends silently on Ctrl-C while it still imports its modules."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # which would print where an import was
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from chitu.commands import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
