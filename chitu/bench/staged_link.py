"""Messages of a staged transport between the two processes of a transfer benchmark, as lines on their pipes.

The parent writes with the engine's own `StagedTransport`; the child has the other end, scatters, and answers a list of
pages by their checksums.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

import msgspec

from chitu.kv_cache.checksum import page_sums_of
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.transports.staged import StagedTransport
from chitu.kv_transfer.transports.transport import MessagingTransport, Transport

PREFIX = "message "
RANK, INCARNATION = 0, 1
"""Rank and incarnation of the other process, for both sides."""


class PipeMessages:
    """The parent's end of the pipes. Lines that are not messages wait for `line`."""

    def __init__(self, transport: Transport, to_child: IO[str], from_child: IO[str]) -> None:
        self._transport = transport
        self._to_child = to_child
        self._from_child = from_child
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        if isinstance(transport, MessagingTransport):
            transport.attach(self.send)
        self._reader = threading.Thread(target=self._read, name="messages", daemon=True)
        self._reader.start()

    def say(self, line: str) -> None:
        with self._lock:
            self._to_child.write(line + "\n")
            self._to_child.flush()

    def send(self, incarnation: int, payload: bytes) -> None:
        self.say(PREFIX + payload.hex())

    def line(self) -> str:
        return self._lines.get()

    def page_sums(self, pages: Sequence[int]) -> list[int]:
        """Return the checksum of each of these pages of the child."""
        self.say(msgspec.json.encode(list(pages)).decode())
        return msgspec.json.decode(self.line(), type=list[int])

    def close(self) -> None:
        """Close the pipes. The child ends at the end of its input."""
        self._to_child.close()
        self._reader.join()
        self._from_child.close()

    def _read(self) -> None:
        for line in self._from_child:
            if line.startswith(PREFIX) and isinstance(self._transport, MessagingTransport):
                self._transport.on_message(RANK, INCARNATION, bytes.fromhex(line.removeprefix(PREFIX)))
            else:
                self._lines.put(line)


def page_sums(pool: KVPool, pages: Sequence[int]) -> list[int]:
    """Return the checksum of each page, over K and V of all layers."""
    sums: list[int] = page_sums_of(pool, 0).sums(range(pool.layout.num_layers), pages).tolist()
    return sums


def answer_page_sums(pool: KVPool, lines: Iterable[str]) -> None:
    for line in lines:
        print(msgspec.json.encode(page_sums(pool, msgspec.json.decode(line, type=list[int]))).decode(), flush=True)


def lines_of(transport: StagedTransport, source: IO[str]) -> Iterator[str]:
    """Handle the messages at the child's end and yield all other lines."""
    transport.attach(lambda incarnation, payload: print(PREFIX + payload.hex(), flush=True))
    for line in source:
        if line.startswith(PREFIX):
            transport.on_message(RANK, INCARNATION, bytes.fromhex(line.removeprefix(PREFIX)))
            transport.scatter_one()
        else:
            yield line
