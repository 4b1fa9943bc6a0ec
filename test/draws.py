"""How much of what is drawn a run draws: fixed examples where a change is tested, which are the same in every run, and
30 times as many fresh ones in `script/nightly.sh`, which sets `CHITU_NIGHTLY` and prints the seed."""

from __future__ import annotations

import os

IS_NIGHTLY = "CHITU_NIGHTLY" in os.environ
EXAMPLES = 30
"""Examples of a property in a run that is not nightly."""


def often(count: int) -> int:
    """Return how many of something to draw, for `count` where a change is tested."""
    return count * (1000 // EXAMPLES) if IS_NIGHTLY else count
