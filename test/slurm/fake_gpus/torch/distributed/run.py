"""Stand-in for torchrun: each rank writes what it was given to `$FAKE_RANKS/NAME.RANK`, and all keep running.

A rank is a process of its own with the environment that a real one inherits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SHOWN = ("CUDA_VISIBLE_DEVICES", "CHITU_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")


def main() -> None:
    words = sys.argv[1:]
    ranks = int(next(word.partition("=")[2] for word in words if word.startswith("--nproc-per-node=")))
    name = words[words.index("--role") + 1][0].upper() + words[words.index("--rank") + 1]
    for rank in range(ranks):
        if os.fork() == 0:
            record = {key: os.environ.get(key) for key in SHOWN}
            part = Path(os.environ["FAKE_RANKS"], f"{name}.{rank}.part")
            part.write_text(json.dumps({**record, "host": os.uname().nodename, "words": words}))
            part.rename(part.with_suffix(""))
            break
    signal.pause()


main()
