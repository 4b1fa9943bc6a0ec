"""Process entry of instances that stamp what they do between P's logits and D's token: `chitu bench gpu --only hops`.
The instances are not aware of it: functions of theirs note the time (`time.monotonic_ns`, one clock for all processes
of a host) when they are called or are done. At its end a process writes its stamps to the folder in CHITU_BENCH_HOPS.

    python -m chitu.tools.bench.gpu.hop_process ARGUMENTS OF chitu.serve.scheduler
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from chitu.engine.model_runner import ModelRunner
from chitu.instance.token_manager import TokenManager
from chitu.kv_transfer.both_sides import TransferOutbox
from chitu.kv_transfer.chunks import ChunkFeed
from chitu.kv_transfer.layout import MetadataBuffers
from chitu.kv_transfer.page_writer import PageWriter
from chitu.kv_transfer.receiving import DecodeReceiver
from chitu.net.threads import end_process
from chitu.pd_scheduler import PDScheduler
from chitu.serve.scheduler import main

FOLDER = "CHITU_BENCH_HOPS"
STAMPED = (
    (PDScheduler, "_take_result", "read", ""),
    (ChunkFeed, "send_rows", "rows", ""),
    (MetadataBuffers, "seal", "seal", "sealed"),
    (PageWriter, "write", "", "written"),
    (TransferOutbox, "leave", "", "left"),
    (DecodeReceiver, "on_frame", "frame", ""),
    (ModelRunner, "_draw_first", "draw", "drawn"),
    (PDScheduler, "_emit", "emit", ""),
    (TokenManager, "flush", "", "flushed"),
)
"""Functions, with the names of the stamps at their begin and end."""

_stamps: list[tuple[str, int]] = []


def _stamped(function: Callable[..., Any], begin: str, end: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if begin:
            _stamps.append((begin, time.monotonic_ns()))
        result = function(*args, **kwargs)
        if end:
            _stamps.append((end, time.monotonic_ns()))
        return result

    return call


def run() -> int:
    """Run the instance, and write its stamps. Return its exit code."""
    for owner, name, begin, end in STAMPED:
        setattr(owner, name, _stamped(getattr(owner, name), begin, end))
    try:
        return main()
    finally:
        (Path(os.environ[FOLDER]) / f"{os.getpid()}.json").write_text(json.dumps(_stamps))


if __name__ == "__main__":
    end_process(run())
