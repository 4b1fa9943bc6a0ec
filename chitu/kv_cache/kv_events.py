"""KV events: what enters and leaves the prefix cache of an instance, for indexers of others (docs/gateway.md).

The step thread notes changes in a `KVEventLog`, in the order in which they happen; the thread `kv-events` of a
`KVEventFeed` encodes and publishes them. With no log, nothing is noted and no tokens are kept.

The stream is that of vLLM, which other projects read. A PUB socket sends topic, number and payload; numbers (8 bytes,
big-endian) count from 0 without a gap. The payload is a msgpack array of the time (s since 1970), the events and the
data rank. A second socket, a ROUTER, answers a number with all kept messages from there on, and with the number -1.
If more happens than the log holds, events are dropped and a number is left out: a reader that misses a number which it
cannot get again knows that its index is wrong.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import zmq

from chitu.kv_cache.prefix_index import TOKEN_BYTES, PageKeys
from chitu.net.sockets import MAX_SMALL_FRAME_BYTES, bind
from chitu.net.threads import Spawn
from chitu.protocol import unpack_i32

Encoding = Literal["map", "array"]

MAX_WAITING_PAGES = 1 << 16
"""Pages in the log that are not published yet. Far more than enter or leave in the time of a few steps."""
MAX_BATCH_TOKENS = 4096
"""Tokens of one message; those of more pages are spread over several. It bounds the memory of the kept messages."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number of the message that ends an answer."""
MEDIUM = "GPU"
"""The pool of an instance, in the words of the schema, whatever device it is on."""
IMAGE_ID_BYTES = 32
"""Bytes (64 hex digits) of what readers take for the identity of an image."""


class StoredBlocks(msgspec.Struct, tag="BlockStored", frozen=True):
    """Pages that follow each other in a chain and can be found from now on."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    """Hash of the page before the first one; None at the start of a sequence."""
    token_ids: Sequence[int]
    """Those of all these pages."""
    block_size: int
    """Tokens per page."""
    lora_id: int | None
    """Always None; `lora_name` names the adapter."""
    medium: str
    lora_name: str | None
    extra_keys: Sequence[Sequence[str] | None] | None
    """For each page what enters its key beside tokens; None if that is nothing for all of them."""


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Pages that can no longer be found."""

    block_hashes: Sequence[int]
    medium: str


class ClearedBlocks(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """No page can be found any more."""


Event = StoredBlocks | RemovedBlocks | ClearedBlocks


class _Stored(NamedTuple):
    keys: list[bytes]
    parent: bytes | None
    token_ids: bytes
    adapter: str
    extra: list[list[str] | None] | None


_Change = _Stored | list[bytes] | None
"""Pages that came, keys that left, or all that left."""


def block_hash(key: bytes) -> int:
    """Return the hash of a page for readers: the last 64 bits of its key, as they shorten longer hashes, too."""
    return int.from_bytes(key[-8:], "big")


def extra_keys(keys: PageKeys, page: int) -> list[str] | None:
    """Return what enters the key of a page beside its tokens, as strings: the adapter's name, 64 hex digits for the
    rows of images that begin in it, and on the first page 32 hex digits in place of the `cache_salt`, which is not
    published. None if there is nothing."""
    found = [keys.adapter] if keys.adapter else []
    if mark := keys.marks.get(page):
        found.append(blake2b(mark, digest_size=IMAGE_ID_BYTES).hexdigest())
    if keys.is_salted and not page:
        found.append(keys.root.hex())
    return found or None


class KVEventLog:
    """The changes that wait to be published, oldest first. `page_size`: tokens per page."""

    def __init__(self, page_size: int, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called on the step thread after a change."""
        self._page_size = page_size
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: list[_Change] = []
        self._num_pages = 0
        self._is_short = False

    # ----------------------------------------------------------------------------------------------------- step thread

    def stored(self, keys: PageKeys, names: Sequence[bytes], positions: Sequence[int], token_ids: bytes) -> None:
        """Note pages that have entered the index. `names`: the keys of the sequence's first pages; `positions`: the new
        ones among them, ascending; `token_ids` (int32 LE): those of the sequence."""
        size, first = self._page_size * TOKEN_BYTES, 0
        for end in range(1, len(positions) + 1):
            if end < len(positions) and positions[end] == positions[end - 1] + 1:
                continue
            start, stop = positions[first], positions[end - 1] + 1
            extra = [extra_keys(keys, page) for page in range(start, stop)]
            self._put(
                _Stored(
                    list(names[start:stop]),
                    names[start - 1] if start else None,
                    token_ids[start * size : stop * size],
                    keys.adapter,
                    extra if any(extra) else None,
                ),
                stop - start,
            )
            first = end

    def removed(self, names: list[bytes]) -> None:
        """Note keys that have left the index."""
        if names:
            self._put(names, len(names))

    def cleared(self) -> None:
        """Note that the index is empty."""
        self._put(None, 1)

    def _put(self, change: _Change, num_pages: int) -> None:
        with self._lock:
            if self._num_pages + num_pages > MAX_WAITING_PAGES and self._changes:
                self._is_short = True
                return
            self._changes.append(change)
            self._num_pages += num_pages
        self._wake()

    # ------------------------------------------------------------------------------------------------------ any thread

    def take(self) -> tuple[list[_Change], bool]:
        """Return and forget the changes that wait, and whether later ones were dropped."""
        with self._lock:
            changes, is_short = self._changes, self._is_short
            self._changes, self._num_pages, self._is_short = [], 0, False
        return changes, is_short

    def batches(self, changes: Sequence[_Change]) -> Iterator[list[Event]]:
        """Yield the events of these changes, with at most `MAX_BATCH_TOKENS` tokens or as many keys in each list."""
        batch: list[Event] = []
        room = MAX_BATCH_TOKENS
        for change in changes:
            for event, cost in self._events(change):
                if batch and cost > room:
                    yield batch
                    batch, room = [], MAX_BATCH_TOKENS
                batch.append(event)
                room -= cost
        if batch:
            yield batch

    def _events(self, change: _Change) -> Iterator[tuple[Event, int]]:
        """Yield the events of a change, and how much of a message each takes."""
        if change is None:
            yield ClearedBlocks(), 1
            return
        hashes = [block_hash(key) for key in (change.keys if isinstance(change, _Stored) else change)]
        if not isinstance(change, _Stored):
            for start in range(0, len(hashes), MAX_BATCH_TOKENS):
                part = hashes[start : start + MAX_BATCH_TOKENS]
                yield RemovedBlocks(part, MEDIUM), len(part)
            return
        tokens, size = unpack_i32(change.token_ids), self._page_size
        parent = None if change.parent is None else block_hash(change.parent)
        step = max(1, MAX_BATCH_TOKENS // size)
        for start in range(0, len(hashes), step):
            part, of_part = hashes[start : start + step], tokens[start * size : (start + step) * size]
            extra = change.extra[start : start + step] if change.extra is not None else None
            if extra is not None and not any(extra):
                extra = None
            yield (
                StoredBlocks(part, parent, _list(of_part), size, None, MEDIUM, change.adapter or None, extra),
                len(of_part),
            )
            parent = part[-1]


def _list(tokens: array[int]) -> list[int]:
    """Return a list: msgspec does not encode arrays."""
    return tokens.tolist()


def encode_batch(time_s: float, events: Sequence[Event], data_rank: int, encoding: Encoding) -> bytes:
    """Return the payload of a message. `map`: each event is a map with its `type`; `array`: an array that begins with
    it, in the order of the fields."""
    shown: list[Any] = list(events)
    if encoding == "array":
        shown = [[event.__struct_config__.tag, *msgspec.structs.astuple(event)] for event in events]
    return msgspec.msgpack.encode([time_s, shown, data_rank])


class KVEventFeed:
    """The sockets of an instance's stream. Its thread owns them from `start` on."""

    POLL_MS: ClassVar[int] = 1000

    def __init__(
        self,
        host: str,
        port: int,
        replay_port: int,
        *,
        topic: str,
        page_size: int,
        data_rank: int = 0,
        encoding: Encoding = "map",
        most_kept: int = 1000,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Listen at `host`; with `replay_port` 0 nothing is kept. `most_kept`: messages that can be had again, the
        newest. `now`: seconds since 1970. Raises zmq.ZMQError if a port is taken."""
        self.log = KVEventLog(page_size, self._wake)
        self._topic, self._data_rank, self._encoding, self._now = topic.encode(), data_rank, encoding, now
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=most_kept if replay_port else 0)
        self._number = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub, self.port = bind(self._context, zmq.PUB, host, port, MAX_SMALL_FRAME_BYTES)
            if replay_port:
                self._replay, self.replay_port = bind(
                    self._context, zmq.ROUTER, host, replay_port, MAX_SMALL_FRAME_BYTES
                )
                self._replay.setsockopt(zmq.SNDHWM, most_kept + 1)
        except zmq.ZMQError:
            self._free()
            raise

    def start(self, spawn: Spawn) -> None:
        """Start the thread. `spawn(name, target)` makes one whose death must end the process."""
        self._thread = spawn("kv-events", self._run)
        self._thread.start()

    def close(self) -> None:
        """Publish what waits and close the sockets. The step thread notes nothing any more."""
        self._is_closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
            if self._thread.is_alive():  # it still uses them
                return
        self._free()

    def publish_waiting(self) -> None:
        """Publish what waits in the log."""
        changes, is_short = self.log.take()
        for events in self.log.batches(changes):
            payload = encode_batch(self._now(), events, self._data_rank, self._encoding)
            number = self._number.to_bytes(NUMBER_BYTES, "big")
            self._pub.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
            self._number += 1
        self._number += is_short

    def answer_waiting(self) -> None:
        """Answer all readers that ask for messages again."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                continue  # no question of this protocol
            try:
                for number, payload in [*self._kept, (END, b"")]:
                    if number >= frames[2]:  # both big-endian, so as the numbers are; -1 is the largest
                        self._replay.send_multipart((frames[0], b"", number, payload), zmq.NOBLOCK)
            except zmq.ZMQError:  # the reader is gone, or does not read: it may ask again
                continue

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._is_closed:
            if any(ready == self._wake_fd for ready, _ in poller.poll(self.POLL_MS)):
                os.eventfd_read(self._wake_fd)
            self.publish_waiting()
            self.answer_waiting()
        self.publish_waiting()

    def _free(self) -> None:
        self._context.destroy(linger=200)
        os.close(self._wake_fd)
