"""Sessions that claim memory that they should not: transports of one host refuse them and leave nothing open."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from transport_process import new_pool, new_transport

from chitu.errors import TransferFailed
from chitu.kv_transfer.layout import rank_memory
from chitu.kv_transfer.transports.shm import ShmTransport
from chitu.protocol import TransportSession


@pytest.mark.parametrize(
    ("kind", "name", "value", "words"),
    [
        ("shm", "inode", "1", "inode"),
        ("shm", "start_time", "1", "another process"),
        ("shm", "host_id", "elsewhere", "not a process of this host"),
        ("shm", "fd", "9999", "cannot map"),
        ("shm", "fd", "-1", "negative"),
        ("shm", "pid", "nobody", "malformed session"),
        ("shm", "offset", str(1 << 40), "too few"),
        ("cuda_ipc", "start_time", "1", "another process"),
        ("cuda_ipc", "host_id", "elsewhere", "not a process of this host"),
        ("cuda_ipc", "pid", "nobody", "malformed session"),
        ("cuda_ipc", "handle", "xyz", "malformed session"),
        ("cuda_ipc", "handle", "00" * 64, "cannot be mapped"),
        ("cuda_ipc", "offset", str(1 << 40), "do not fit"),
        ("cuda_ipc", "offset", "-1", "do not fit"),
    ],
)
def test_a_session_that_names_other_memory_is_refused(kind: str, name: str, value: str, words: str) -> None:
    pool, transport = new_pool(), new_transport(kind)
    transport.register(pool.arena_base, pool.arena_bytes)
    memory, session = rank_memory(pool, 0, [transport.local_session()]), transport.local_session()
    transport.disconnect(transport.connect(memory, session))
    wrong = TransportSession(session.transport, session.session_id, {**session.attributes, name: value})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferFailed, match=words):
        transport.connect(memory, wrong)
    assert len(os.listdir("/proc/self/fd")) == before
    transport.close()


def test_shm_refuses_a_session_that_names_an_ordinary_file_of_the_process(tmp_path: Path) -> None:
    pool, transport = new_pool(), ShmTransport()
    transport.register(pool.arena_base, pool.arena_bytes)
    memory, session = rank_memory(pool, 0, [transport.local_session()]), transport.local_session()
    with (tmp_path / "precious").open("w+b") as file:
        file.truncate(pool.arena_bytes)
        info = os.fstat(file.fileno())
        named = {**session.attributes, "fd": str(file.fileno()), "inode": str(info.st_ino), "offset": "0"}
        with pytest.raises(TransferFailed, match="no anonymous shared file"):
            transport.connect(memory, TransportSession(session.transport, session.session_id, named))
    transport.close()


def test_memory_that_is_no_shared_file_can_be_a_source_but_has_no_session() -> None:
    buffer = bytearray(1 << 20)
    base = ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
    transport = ShmTransport()
    transport.register(base, len(buffer))
    with pytest.raises(TransferFailed, match="shared file"):
        transport.local_session()
    with pytest.raises(TransferFailed, match="not host memory"):
        transport.register(1 << 46, 4096)
