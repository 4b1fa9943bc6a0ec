"""The other processes of the transport tests: `-m transport_process receive KIND HOST` or `send KIND HOST PAGES`.
Kinds: shm, mooncake, nixl, cuda_ipc (twins of driver and copies, pool on the host), cuda_ipc_gpu (the real ones, pool
on the GPU).

`receive`: registers a pool, prints its `RankMemory` (hex) on the first line, then answers one line per command on
stdin: `crc REGION` (CRC-32 of every page), `verify SLOT ROOM_HEX` (`ok` or the error name), `break` (ends all TCP
connections of this process), `cpu` (CPU seconds used so far). Ends at end of file. `send`: reads a `RankMemory` line,
writes its first pages to the peer from a thread, prints `sent`, and exits normally.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import zlib
from pathlib import Path

import msgspec
import torch

from chitu.config.schema import PDDisaggregationConfig
from chitu.errors import Integrity
from chitu.kv_cache.pool import KVPool
from chitu.kv_transfer.layout import MetadataBuffers, rank_memory
from chitu.kv_transfer.shard_writer import pair_regions, plan_page_copies
from chitu.kv_transfer.transports.local import open_transports
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.nixl import NixlTransport
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.kv_transfer.transports.transport import Transport
from chitu.protocol import KVLayout, RankMemory, encode

LAYOUT = KVLayout.uniform(
    "test", num_layers=3, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32", vocab_size=1000
)
NUM_PAGES, NUM_AUX_SLOTS = 2000, 4
CLONE_NEWNET = 0x40000000


def new_pool(kind: str = "shm") -> KVPool:
    return KVPool(LAYOUT, NUM_PAGES, NUM_AUX_SLOTS, "cuda:0" if kind == "cuda_ipc_gpu" else "cpu")


def new_transport(kind: str, host: str = "127.0.0.1") -> Transport:
    if kind == "cuda_ipc":
        from cuda_ipc_twin import cuda_ipc_twin

        return cuda_ipc_twin()
    if kind == "cuda_ipc_gpu":
        (transport,) = open_transports(PDDisaggregationConfig(transport="cuda_ipc"), "127.0.0.1", "cuda:0")
        return transport
    if kind == "nixl":
        os.environ["UCX_TLS"] = "tcp"  # as between hosts; within a host UCX could write without the peer running
        return NixlTransport(host)
    return ShmTransport() if kind == "shm" else MooncakeTransport(host)


def region(pool: KVPool, index: int) -> torch.Tensor:
    return (pool.k if index % 2 == 0 else pool.v)[index // 2]


def page_crcs(pool: KVPool, index: int) -> list[int]:
    return [zlib.crc32(page) for page in region(pool, index).cpu().numpy()]


def break_connections() -> None:
    """End every TCP connection of this process, including the libraries' own."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as end:
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        end.getpeername()
                        end.shutdown(socket.SHUT_RDWR)


def receive(kind: str, host: str) -> None:
    pool, transport = new_pool(kind), new_transport(kind, host)
    buffers = MetadataBuffers(pool.aux_rows, 4 * LAYOUT.vocab_size)
    transport.register(pool.arena_base, pool.arena_bytes)
    print(encode(rank_memory(pool, 0, [transport.local_session()])).hex(), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["crc", index]:
                print(*page_crcs(pool, int(index)), flush=True)
            case ["break"]:
                break_connections()
                print("broken", flush=True)
            case ["cpu"]:
                print(time.process_time(), flush=True)
            case ["verify", slot, room]:
                try:
                    buffers.verify(int(slot), bytes.fromhex(room))
                    print("ok", flush=True)
                except Integrity:
                    print("Integrity", flush=True)
    transport.close()


def send(kind: str, host: str, num_pages: str) -> None:
    pool, transport = new_pool(kind), new_transport(kind, host)
    transport.register(pool.arena_base, pool.arena_bytes)
    peer_memory = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=RankMemory)
    pages = range(int(num_pages))
    copies = plan_page_copies(pair_regions(pool, peer_memory), pages, pages, range(2 * LAYOUT.num_layers))

    def run() -> None:
        peer = transport.connect(peer_memory, peer_memory.sessions[0])
        transport.write(peer, copies, 20.0)
        transport.disconnect(peer)
        print("sent", flush=True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    transport.close()


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    {"receive": receive, "send": send}[command](*arguments)
