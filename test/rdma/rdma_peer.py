"""One end of a transfer inside a VM: `python rdma_peer.py rdma|tcp ADDRESS`. No torch, no model; chitu's own transport.

It registers an arena of NUM_PAGES pages, prints its `RankMemory` (hex), then answers each line of its standard input,
`{"do": NAME, ...}`, by one JSON line:

    connect memory=HEX                      {}
    write pages=[...] seed=N timeout_s=S    {"took_s": S, "sums": [...]}, sums of what was sent
    fence timeout_s=S                       {"is_fenced": BOOL}
    sums pages=[...]                        {"sums": [...]}, CRC-32 of these pages of its arena
    fill pages=[...] byte=N                 {}

An error of chitu is `{"error": its sentence, "kind": its class, "is_fenced": BOOL}`. Page N of the writer goes to page
N of its peer.

`python rdma_peer.py nursery SOCKET` imports once what an end needs, which takes an emulated processor many seconds, and
forks an end for each connection: its arguments (`NAME=VALUE` for its environment first) come with its standard streams.
The connection's end kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np

from chitu.errors import ChituError
from chitu.kv_transfer.transports.mooncake import MooncakeTransport
from chitu.kv_transfer.transports.transport import CopyList, PeerHandle
from chitu.protocol import RankMemory, encode

NUM_PAGES = 64
PAGE_BYTES = 64 << 10


class Peer:
    """An arena and its transport. Answers one command at a time."""

    def __init__(self, protocol: str, address: str) -> None:
        self._arena = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self._base = int(self._arena.ctypes.data)
        self._transport = MooncakeTransport(address, protocol)
        self._transport.register(self._base, self._arena.nbytes)
        self._peer: PeerHandle | None = None
        self._peer_base = 0

    def offer(self) -> str:
        sessions = (self._transport.local_session(),)
        return encode(RankMemory(0, sessions, self._base, self._arena.nbytes, (), (), NUM_PAGES, 0, 0, 0)).hex()

    def connect(self, memory: str) -> dict[str, object]:
        offered = msgspec.msgpack.decode(bytes.fromhex(memory), type=RankMemory)
        self._peer = self._transport.connect(offered, offered.sessions[0])
        self._peer_base = offered.arena_base
        return {}

    def write(self, pages: Sequence[int], seed: int, timeout_s: float) -> dict[str, object]:
        assert self._peer is not None
        filled = sorted(set(pages))
        self._arena[filled] = np.random.default_rng(seed).integers(0, 256, (len(filled), PAGE_BYTES), np.uint8)
        starts = [page * PAGE_BYTES for page in pages]
        src, dst = ([base + start for start in starts] for base in (self._base, self._peer_base))
        started_s = time.monotonic()
        self._transport.write(self._peer, CopyList(src, dst, [PAGE_BYTES] * len(pages)), timeout_s)
        return {"took_s": time.monotonic() - started_s, **self.sums(pages)}

    def fence(self, timeout_s: float) -> dict[str, object]:
        assert self._peer is not None
        return {"is_fenced": self._transport.fence(self._peer, timeout_s)}

    def sums(self, pages: Sequence[int]) -> dict[str, object]:
        return {"sums": [zlib.crc32(self._arena[page]) for page in pages]}

    def fill(self, pages: Sequence[int], byte: int) -> dict[str, object]:
        self._arena[pages] = byte
        return {}


def main(protocol: str, address: str) -> None:
    try:
        peer = Peer(protocol, address)
    except ChituError as error:
        sys.exit(str(error))
    print(peer.offer(), flush=True)
    commands = {name: getattr(peer, name) for name in ("connect", "write", "fence", "sums", "fill")}
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer = commands[words.pop("do")](**words)
        except ChituError as error:
            answer = {"error": str(error), "kind": type(error).__name__, "is_fenced": getattr(error, "fenced", True)}
        print(json.dumps(answer), flush=True)


def fork_ends(path: str) -> None:
    """Serve as the nursery of ends; see the module's docstring."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    children: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([listener, *children], [], [], 0.05)
        for connection in ready:
            if connection is listener:
                connection, _ = listener.accept()
                words, streams, _, _ = socket.recv_fds(connection, 4096, 3)
                if (pid := os.fork()) == 0:
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                    run_end(words.decode().split("\0"))
                for stream in streams:
                    os.close(stream)
                children[connection] = pid
            elif not connection.recv(1):  # its launcher was killed
                os.kill(children[connection], signal.SIGKILL)
        for connection, pid in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()
                del children[connection]


def run_end(words: list[str]) -> NoReturn:
    """Run an end in this process, which is new."""
    try:
        while "=" in words[0]:
            name, _, os.environ[name] = words.pop(0).partition("=")
        main(*words)
    except SystemExit as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        fork_ends(sys.argv[2])
    main(*sys.argv[1:])
