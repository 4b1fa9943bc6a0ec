"""Records what one rank computes with torch's profiler, into a file that Perfetto and `chrome://tracing` show.

`RankProfiler` belongs to the thread that computes: torch records the operators of that thread, and all kernels of the
process on a GPU. Nothing is imported or paid before the first `begin`. A fault of the profiler or of its folder is
logged and ends the profile, never the rank.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SUFFIX = ".trace.json.gz"


class RankProfiler:
    """`rank`: TP rank, in the names of the files."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: Any = None
        self._file = Path()
        self._max_bytes = 0

    def begin(self, stem: str, max_bytes: int) -> None:
        """Begin to record. `stem`: path of the file without rank and suffix. `max_bytes`: a larger file is not kept."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._file, self._max_bytes = Path(f"{stem}.{self._rank}{SUFFIX}"), max_bytes
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            recorded = profile(activities=kinds, acc_events=True)
            recorded.start()
        except (OSError, RuntimeError) as error:
            logger.error("nothing is profiled: %s", error)
            return
        self._profile = recorded

    def end(self) -> None:
        """Write the file. Does nothing if nothing is recorded."""
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        partial = self._file.with_name(f".{self._file.name}.partial{SUFFIX}")
        try:
            recorded.stop()
            recorded.export_chrome_trace(str(partial))
            if (size := partial.stat().st_size) > self._max_bytes:
                logger.error(
                    "%s: not kept: it has %d bytes, of %d (trace.profile_mb)", self._file, size, self._max_bytes
                )
                return
            os.replace(partial, self._file)
            logger.info("profile written: %s (%d bytes)", self._file, size)
        except (OSError, RuntimeError) as error:
            logger.error("%s: the profile is lost: %s", self._file, error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
