"""The socket to an instance, of an outbox that opens none: it is told what is sent, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chitu.router.candidates import InstanceKey


@dataclass
class KeyedPeer:
    outbox: Any
    key: InstanceKey

    def send(self, frame: bytes) -> bool:
        sent: bool = self.outbox.send(self.key, frame)
        return sent

    def close(self, linger_ms: int = 0) -> None:
        self.outbox.close_peer(self.key)
