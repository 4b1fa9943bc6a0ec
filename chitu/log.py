"""Log set-up and the anchors: lines that tests, operators and the topology check search for (S3)."""

from __future__ import annotations

import logging
import sys

CREATED_PD_REQUEST = "created pd request: %s -> P%d-D%d"
PROCESSING_PREFILL = "processing prefill request: %s"
FINISHED_KV = "finished kv cache transfer for %s"
FINISHED_AUX = "finished aux transfer for %s"
PROCESSING_DECODE = "processing decode request: %s"
DECODE_REGISTERED = "decode endpoint registered to prefill (engine_rank=%d)"
RECEIVED_KV = "received kv cache for %s"


def setup_logging(process: str, level: str = "INFO") -> None:
    """One line a record on stderr: time, process name (`router`, `P0`), level, module, message."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {process} %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
