"""Readers of KV events, as other projects have them: by the schema that vLLM publishes, with nothing but the stream."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from chitu.kv_cache.kv_events import Encoding


# Written from the schema that vLLM publishes: from 0.24 on events are maps, before they were arrays.
class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored", omit_defaults=True):
    """As of 2025: readers of that time know no field behind `lora_id`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", omit_defaults=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


DECODERS: dict[Encoding, msgspec.msgpack.Decoder[Any]] = {
    "map": msgspec.msgpack.Decoder(EventBatch),
    "array": msgspec.msgpack.Decoder(ArrayBatch),
}


@dataclass
class EventReader:
    """An index of another project: it has nothing but the payloads."""

    encoding: Encoding = "map"
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By hash of a page: all tokens up to its end."""
    extra: dict[int, Any] = field(default_factory=dict)

    def read(self, payload: bytes) -> None:
        for event in DECODERS[self.encoding].decode(payload).events:
            name = type(event).__struct_config__.tag
            if name == "AllBlocksCleared":
                self.tokens.clear()
            elif name == "BlockRemoved":
                for key in event.block_hashes:
                    del self.tokens[key]
            else:
                self._store(event)

    def _store(self, event: Any) -> None:
        before = () if event.parent_block_hash is None else self.tokens[event.parent_block_hash]
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for place, key in enumerate(event.block_hashes):
            start = place * event.block_size
            before += tuple(event.token_ids[start : start + event.block_size])
            assert key not in self.tokens, "stored twice"
            self.tokens[key] = before
            self.extra[key] = (getattr(event, "extra_keys", None) or [None] * (place + 1))[place]


class EventSubscriber:
    """A reader with sockets, which asks again for what it missed."""

    def __init__(self, port: int, replay_port: int) -> None:
        self.context = zmq.Context()
        self.sub, self.ask = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.sub.connect(f"tcp://127.0.0.1:{port}")
        self.ask.connect(f"tcp://127.0.0.1:{replay_port}")
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")

    def next(self) -> tuple[bytes, int, bytes]:
        assert self.sub.poll(10_000), "no message"
        topic, number, payload = self.sub.recv_multipart()
        return topic, struct.unpack(">Q", number)[0], payload

    def again(self, start: int) -> list[tuple[int, bytes]]:
        """Return the kept messages from number `start` on."""
        self.ask.send_multipart([b"", start.to_bytes(8, "big")])
        found = list[tuple[int, bytes]]()
        while True:
            assert self.ask.poll(10_000), "no answer"
            _, number, payload = self.ask.recv_multipart()
            if number == b"\xff" * 8:
                return found
            found.append((struct.unpack(">Q", number)[0], payload))

    def close(self) -> None:
        self.context.destroy(linger=0)
