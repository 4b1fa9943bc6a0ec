"""What a process of the router records of the requests that are traced. Loop thread.

`RouterTrace.level` decides which are; the records go to `TraceFiles`, whose thread writes them.
"""

from __future__ import annotations

import random
import secrets
import tempfile
from pathlib import Path

from chitu.clock import Clock
from chitu.config.schema import TraceConfig
from chitu.errors import InvalidRequest
from chitu.protocol import TraceLevel
from chitu.protocol.snapshot import RequestSnapshot
from chitu.protocol.trace import MAX_FRAME_BYTES, TraceFrame, TraceRequest
from chitu.tracing.trace_files import TraceFiles
from chitu.types import room_text

HEADER = "X-Chitu-Trace"
LEVELS: dict[bytes, TraceLevel] = {b"0": "", b"1": "records", b"frames": "frames"}


def trace_folder(config: TraceConfig) -> Path:
    """Return the configured folder, or a new name under the temporary folder. Creates nothing."""
    if config.dir:
        return Path(config.dir).expanduser().absolute()
    return Path(tempfile.gettempdir()) / f"chitu-trace-{secrets.token_hex(8)}"


class RouterTrace:
    def __init__(self, config: TraceConfig, files: TraceFiles, name: str, clock: Clock) -> None:
        """`name` is that of this process: `router`, `router.1`."""
        self._config = config
        self._name = name
        self._clock = clock
        self.files = files
        self.framed: dict[bytes, str] = {}
        """Rooms whose token messages are recorded, with their request ids; empty if there are none."""

    def level(self, given: bytes | None) -> TraceLevel:
        """Return the level of a new request, by its header `X-Chitu-Trace`. Raises InvalidRequest if that is invalid or
        not allowed."""
        if given is None:
            return "records" if self._config.sample and random.random() < self._config.sample else ""
        level = LEVELS.get(given)
        if level is None:
            text = given[:40].decode("latin-1")
            raise InvalidRequest(f"{HEADER}: {text!r} is none of {', '.join(x.decode() for x in LEVELS)}", HEADER)
        if level and not self._config.by_header:
            raise InvalidRequest(f"{HEADER}: this server traces nothing for clients (trace.by_header)", HEADER)
        return level

    def note_request(
        self,
        request_id: str,
        path: str,
        tenant: str,
        arrived_s: float,
        received_s: float,
        error: str,
        choices: list[list[RequestSnapshot]],
    ) -> None:
        """Record a request whose answer is over."""
        record = TraceRequest(
            request_id=request_id,
            room="",
            instance=self._name,
            at_s=self._clock.monotonic(),
            path=path,
            tenant=tenant,
            arrived_s=arrived_s,
            received_s=received_s,
            error=error,
            choices=tuple(tuple(attempts) for attempts in choices),
        )
        self.files.add(record)

    def note_frame(self, request_id: str, room: bytes, direction: str, port: str, frame: bytes) -> None:
        record = TraceFrame(
            request_id=request_id,
            room=room_text(room),
            instance=self._name,
            at_s=self._clock.monotonic(),
            direction="sent" if direction == "sent" else "received",
            port=port,
            num_bytes=len(frame),
            data=frame if len(frame) <= MAX_FRAME_BYTES else b"",
        )
        self.files.add(record)
